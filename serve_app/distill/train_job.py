"""Trains with several workers, which Ray Train starts and watches.

When a worker dies, Ray Train ends the others and starts all of them again. They go on from the last
checkpoint in the run's folder, which all of them have to share. Ray is imported here: the
environment has to be prepared before this module is imported.
"""

import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError
from tqdm import tqdm

from eesd_dist.distill.train.loop import train_rank
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.errors import ConfigError, EesdError, EngineError

_MAX_FAILURES = 3
_POLL_S = 0.5
_TIMEOUT_S = 300
"""Longest wait of a worker for another worker in the middle of a step."""


def train(request: TrainRequest, *, num_cpus: float) -> None:
    """Trains with `request.workers` processes. Raises a worker's error, or EngineError."""
    request = _with_absolute_paths(request)
    uses_gpu = _uses_gpus(request)
    notes = request.run_folder / "ray"
    with _bar(request), _interrupts_restored():
        _be_quiet()
        trainer = TorchTrainer(
            _work,
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


def _work(config: dict[str, Any]) -> None:
    """Runs in the process of each worker."""
    context = ray.train.get_context()
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


def _be_quiet() -> None:
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
def _bar(request: TrainRequest) -> Iterator[None]:
    """Follows the run's log, which the first worker writes in its own process."""
    done = threading.Event()
    log = request.run_folder / "log.jsonl"

    def follow() -> None:
        with tqdm(total=request.max_steps, unit="step", file=sys.stderr, disable=None) as bar:
            while not done.wait(_POLL_S):
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


def _ours(error: TrainingFailedError) -> EesdError:
    """Returns the error that a worker raised, without Ray's wrapping."""
    for failure in getattr(error, "worker_failures", {}).values():
        at: BaseException | None = failure
        while at is not None:
            if isinstance(at, EesdError):
                return at
            at = getattr(at, "cause", None) or at.__cause__
    return EngineError(f"training failed in its workers {_MAX_FAILURES + 1} times: {error}")
