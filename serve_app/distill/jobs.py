"""The work of distillation on Ray: collecting, training, and the rows of a running service.

Ray is imported here: the environment has to be prepared before this module is imported.
"""

import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from eesd_dist.distill.collector import Chunk, MadeShard, ShardJob, ShardWorker
from eesd_dist.distill.features import ShardEntry
from eesd_dist.distill.sources import TextRows
from eesd_dist.distill.train.loop import train_rank
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.errors import (
    CapacityError,
    ConfigError,
    EesdError,
    EngineError,
    RequestError,
    os_error_text,
)
from eesd_dist.model.weights import weights_digest
from eesd_dist.progress import progress_bar
from eesd_dist.types import Request, RequestId
from serve_app.service.connect import our_error

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ChunkWorker:
    """Holds the target in one process; Ray Data passes it a chunk at a time."""

    def __init__(self, job: ShardJob) -> None:
        self._worker = ShardWorker(job)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, list[str]]:
        return {"answer": [json.dumps(self.answer(str(text))) for text in rows["chunk"]]}

    def answer(self, chunk: str) -> dict[str, Any]:
        """Returns the shard; nothing when the time is spent; errors as text, since Ray Data keeps
        no more of an exception."""
        try:
            shard = self._worker.make(Chunk.from_json(chunk))
        except ConfigError as error:
            return {"config_error": str(error)}
        except EesdError as error:
            return {"error": str(error)}
        except OSError as error:  # a disk that is full, or may not be written to
            return {"config_error": os_error_text(error)}
        return {} if shard is None else asdict(shard)


def make_shards(job: ShardJob, chunks: Sequence[Chunk], *, num_cpus: float) -> Iterator[MadeShard]:
    """Collects with Ray Data, and yields shards in order of completion. Raises ConfigError or
    EngineError.

    Rows are chunks as JSON; a pool of actors turns each into a shard on disk and returns its entry.
    """
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    workers = job.num_workers(len(chunks), num_gpus=num_gpus)
    _silence_ray_data()
    rows = ray.data.from_items(
        [{"chunk": chunk.to_json()} for chunk in chunks], override_num_blocks=len(chunks)
    )
    answers = rows.map_batches(
        ChunkWorker,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=num_cpus,
        num_gpus=1.0 if num_gpus else 0.0,
    )
    try:
        for row in answers.iter_rows():
            yield from _shards(json.loads(row["answer"]))
    except RayError as error:  # a worker that died several times
        raise EngineError(f"a collecting worker failed: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """Returns Ray's first line, and the last one, which is the exception's, without colours."""
    text = _COLOUR.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__


def _silence_ray_data() -> None:
    """Turns off Ray Data's output: the step has a progress bar."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _shards(answer: dict[str, Any]) -> Iterator[MadeShard]:
    if "config_error" in answer:
        raise ConfigError(answer["config_error"])
    if "error" in answer:
        raise EngineError(answer["error"])
    if answer:
        yield MadeShard(entry=ShardEntry(**answer["entry"]), spent_s=answer["spent_s"])


_MAX_FAILURES = 3
_LOG_POLL_S = 0.5
_TIMEOUT_S = 300
"""Longest wait of a worker for another worker in the middle of a step."""


def train(request: TrainRequest, *, num_cpus: float) -> None:
    """Trains with `request.workers` processes. Raises a worker's error, or EngineError.

    When a worker dies, Ray Train ends the others and starts all of them again. They go on from the
    last checkpoint in the run's folder, which all of them have to share.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    request = _with_absolute_paths(request)
    uses_gpu = _uses_gpus(request)
    notes = request.run_folder / "ray"
    with _progress_bar(request), _interrupts_restored():
        _silence_ray_train()
        trainer = TorchTrainer(
            _train_worker,
            train_loop_config={"request": request, "threads": request.threads_of_worker},
            torch_config=TorchConfig(backend="nccl" if uses_gpu else "gloo", timeout_s=_TIMEOUT_S),
            scaling_config=ScalingConfig(
                num_workers=request.workers,
                use_gpu=uses_gpu,
                resources_per_worker={"CPU": num_cpus} | ({"GPU": 1} if uses_gpu else {}),
            ),
            run_config=RunConfig(
                name="train",
                storage_path=str(notes),
                failure_config=FailureConfig(max_failures=_MAX_FAILURES),
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise _ours(error) from error
        finally:
            shutil.rmtree(notes, ignore_errors=True)


def _uses_gpus(request: TrainRequest) -> bool:
    """Returns whether each worker gets a GPU of the cluster. Raises ConfigError where the cluster
    has too few free ones: Ray would wait for them without an end."""
    total = int(ray.cluster_resources().get("GPU", 0))
    device = request.options.device
    if device == "cpu" or (device == "auto" and not total):
        return False
    free = int(ray.available_resources().get("GPU", 0))
    if free < request.workers:
        raise ConfigError(
            f"{request.workers} training workers need a GPU each, and {free} of the cluster's "
            f"{total} are free: stop the service first (the features stay), use fewer workers, or "
            "--device cpu"
        )
    return True


def _train_worker(config: dict[str, Any]) -> None:
    """Runs in the process of each worker."""
    from ray.train import get_context

    context = get_context()
    torch.set_num_threads(config["threads"])
    train_rank(
        config["request"], rank=context.get_world_rank(), world_size=context.get_world_size()
    )


def _with_absolute_paths(request: TrainRequest) -> TrainRequest:
    """Workers have other working directories."""
    return replace(
        request,
        model=request.model.resolve(),
        features=request.features.resolve(),
        out=request.out.resolve(),
        checkpoints=request.run_folder.resolve(),
        start=None if request.start is None else request.start.resolve(),
    )


def _silence_ray_train() -> None:
    """Logs only errors of Ray Train; the step has a progress bar."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    logging.getLogger("ray.train").setLevel(logging.ERROR)


@contextmanager
def _interrupts_restored() -> Iterator[None]:
    """Restores the handler of Ctrl-C: the one that Ray Train leaves behind would ignore it."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        # Ray Train sets one in the main thread only; None was set by no Python code.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def _progress_bar(request: TrainRequest) -> Iterator[None]:
    """Follows the run's log, which the first worker writes in its own process."""
    done = threading.Event()
    log = request.run_folder / "log.jsonl"

    def follow() -> None:
        with progress_bar(title="train", total=request.max_steps, unit="step") as bar:
            while not done.wait(_LOG_POLL_S):
                bar.update(_last_step(log) - bar.n)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        done.set()
        follower.join()


def _last_step(log: Path) -> int:
    """Returns 0 without a log, or while its last row is incomplete."""
    try:
        last = log.read_bytes().splitlines()[-1]
        return int(json.loads(last)["step"])
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def _ours(error: Exception) -> EesdError:
    """Returns the error that a worker raised, without Ray's wrapping."""
    for failure in getattr(error, "worker_failures", {}).values():
        at: BaseException | None = failure
        while at is not None:
            if isinstance(at, EesdError):
                return at
            at = getattr(at, "cause", None) or at.__cause__
    return EngineError(f"training failed in its workers {_MAX_FAILURES + 1} times: {error}")


logger = logging.getLogger(__name__)

_PER_PIPELINE = 64
"""Texts that a pipeline has at a time, at most; its engine batches as many as fit."""
_POLL_S = 0.5
_MAX_ATTEMPTS = 8
"""Failures of the engine during one text: more are not by chance."""
_PATIENCE_S = 900.0
"""Longest time in which no text ends: a pipeline of a large model takes minutes to load."""


class Pipelines(Protocol):
    """The pipelines of a running service."""

    def leaders(self) -> Sequence[Any]:
        """Returns the actors that take requests now."""
        ...


@dataclass(slots=True)
class _Batch:
    """The texts of one call."""

    waiting: deque[Request]
    flying: dict[Any, Request] = field(default_factory=dict)
    done: dict[RequestId, TextRows] = field(default_factory=dict)
    limit: int | None = None
    """Number of texts for which the service had room, once it had none for another."""
    failures: Counter[RequestId] = field(default_factory=Counter)
    """Number of failures of the engine under each text."""


class ServedRows:
    """A `RowSource` over the pipelines of a service: nothing of the target is loaded here.

    Texts go to the drafting actors of the pipelines, over Ray like every operator's call, and come
    back with their features. What a pipeline cannot answer now (it recovers, drains, or has no
    room) is asked again, there or from another one: a text depends on its request alone.
    """

    def __init__(
        self, pipelines: Pipelines, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipelines = pipelines
        self._clock = clock

    def require_target(self, model: Path) -> None:
        """Raises ConfigError if the service serves other weights than those of this folder."""
        digest = weights_digest(model)[:16]
        for leader in self._pipelines.leaders():
            weights = _answer(leader.kv_layout.remote()).weights
            if digest not in weights:
                raise ConfigError(
                    f"the service serves {weights}, other weights than {model} ({digest}): set "
                    "--model to a folder with the target that it serves"
                )

    def rows_of(self, requests: Sequence[Request]) -> list[TextRows]:
        """Returns the texts in order. Raises RequestError for one that the service cannot generate,
        EngineError when it generates none for a long time."""
        batch = _Batch(deque(requests))
        began_s = self._clock()
        trouble: Exception | None = None
        while batch.waiting or batch.flying:
            self._submit(batch)
            num_done = len(batch.done)
            trouble = self._receive(batch) or trouble
            if len(batch.done) > num_done:
                began_s = self._clock()
            elif self._clock() - began_s > _PATIENCE_S:
                raise EngineError(
                    f"the service has generated no text for {_PATIENCE_S:g} s: {trouble}"
                )
        return [batch.done[request.request_id] for request in requests]

    def _submit(self, batch: _Batch) -> None:
        leaders = self._pipelines.leaders() if batch.waiting else ()
        limit = _PER_PIPELINE * len(leaders)
        room = (limit if batch.limit is None else min(limit, batch.limit)) - len(batch.flying)
        for number in range(min(room, len(batch.waiting))):
            request = batch.waiting.popleft()
            # A new name for each attempt: an earlier one may still be leaving its engine.
            name = RequestId(f"{request.request_id}-{uuid4().hex[:8]}")
            leader = leaders[number % len(leaders)]
            text = leader.text_features.remote(replace(request, request_id=name))
            batch.flying[text] = request

    def _receive(self, batch: _Batch) -> Exception | None:
        """Takes the texts that have ended; returns why one has to be asked for again."""
        if not batch.flying:
            time.sleep(_POLL_S)
            return None
        ended, _ = ray.wait(list(batch.flying), num_returns=1, timeout=_POLL_S)
        trouble: Exception | None = None
        for text in ended:
            request = batch.flying.pop(text)
            try:
                batch.done[request.request_id] = TextRows.of(_answer(text))
            except RequestError:
                raise
            except (CapacityError, EngineError) as error:
                trouble = error
                if isinstance(error, CapacityError):
                    batch.limit = max(1, len(batch.flying))
                batch.failures[request.request_id] += isinstance(error, EngineError)
                if batch.failures[request.request_id] > _MAX_ATTEMPTS:
                    raise
                batch.waiting.append(request)
        if trouble is not None:
            logger.info("text asked for again: reason=%s", trouble)
            time.sleep(_POLL_S)
        return trouble


def _answer(call: Any) -> Any:
    try:
        return ray.get(call)
    except RayError as error:
        raise our_error(error) from error
