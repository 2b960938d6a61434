"""Settings of every process that runs an actor.

Applied when an actor is built, not at import; only the log level changes later.
"""

import gc
import logging
import os
import socket

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

from eesd_dist.telemetry.logs import LogFormat, set_up_logs
from eesd_dist.telemetry.tracing import Tracing, make_tracing
from eesd_dist.workers.messages import ProcessInfo, TelemetryOptions


def prepare_process(log_format: LogFormat = "text") -> None:
    """Sets up logging, and keeps libraries from contacting the Hugging Face hub and from starting
    tokenizer threads.

    Logs go to stderr, which Ray keeps in a file per process.
    """
    set_up_logs(log_format)
    set_log_level("INFO")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_log_level(level: str) -> None:
    """Sets the level of this project's log lines in this process."""
    for ours in ("eesd_dist", "serve_app"):
        logging.getLogger(ours).setLevel(level)


def freeze_heap() -> None:
    """Collects garbage once, and hides the objects that are left from the garbage collector.

    A full collection over modules, weights and vocabulary holds every thread of the process up for
    0.3 s. What a former call hid is looked at again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


PROCESS_LOST = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
"""Errors that Ray raises when the process behind a call has died. It is not a `RayActorError` where
Ray's memory monitor has killed the process."""


def thread_environment(num_threads: int) -> dict[str, str]:
    """Returns variables that must be set before torch is imported, so before the process starts.

    glibc's allocator has eight arenas for each core, and threads that come with each epoch spread
    their tensors over more and more of them: 150 MiB after 50 epochs. Two suffice for one loop.
    """
    count = str(num_threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "MALLOC_ARENA_MAX": "2",
    }


def process_info() -> ProcessInfo:
    return ProcessInfo(
        pid=os.getpid(),
        host=ray.util.get_node_ip_address() or socket.gethostname(),
        node_id=ray.get_runtime_context().get_node_id(),
        actor_id=ray.get_runtime_context().get_actor_id() or "",
    )


def tracing_of(options: TelemetryOptions, *, process: str) -> Tracing:
    """Returns the tracing of these options; `process` may have blanks."""
    return make_tracing(options.tracing, process="-".join(process.split()))
