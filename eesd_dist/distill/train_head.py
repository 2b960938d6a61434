"""`eesd distill train`: trains an exit head on collected features with DeepSpeed.

One worker trains in this process; several are started by Ray Train, on this machine or on a running
cluster, and communicate through Gloo on CPUs and NCCL on GPUs. After an interruption the same
command continues.
"""

from pathlib import Path

import torch

from eesd_dist.distill.executor import Executor
from eesd_dist.distill.folders import only_one
from eesd_dist.distill.train.learner import deepspeed_for
from eesd_dist.distill.train.request import TrainInputs, TrainRequest, device_of, first_head
from eesd_dist.distill.train.run_folder import RunFolder, require_free


def train(request: TrainRequest, *, executor: Executor) -> Path:
    """Trains to the end and returns the head's folder; a finished head is not trained again."""
    _require_fit(request)
    if not (request.out.is_dir() and any(request.out.iterdir())):
        with only_one(request.run_folder):
            executor.train(request)
    return request.out


def _require_fit(request: TrainRequest) -> None:
    """Raises ConfigError for errors that can be detected without training; afterwards `request.out`
    is the head of this job, or absent."""
    # With several workers the cluster's resources decide, and this machine may have no GPU.
    device = device_of(request.options) if request.workers == 1 else torch.device("cpu")
    inputs = TrainInputs.of(request, device=device)
    job = inputs.job(request)
    RunFolder(request.run_folder).require_own(job)
    if request.start is not None:
        first_head(request, inputs)
    require_free(request.out, job)
    deepspeed_for(request, device=inputs.device)
