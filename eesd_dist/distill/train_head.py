"""`eesd distill train`: an exit head from collected features, by DeepSpeed.

One worker trains in this process; more are started by Ray Train, here or on a running cluster, and
talk through Gloo on CPUs and NCCL on GPUs. Stopped or killed, the same command goes on.
"""

from pathlib import Path

from eesd_dist.distill.executor import Executor
from eesd_dist.distill.folders import only_one
from eesd_dist.distill.train.learner import load_deepspeed
from eesd_dist.distill.train.request import TrainInputs, TrainRequest, first_head
from eesd_dist.distill.train.run_folder import RunFolder, require_free


def train(request: TrainRequest, *, executor: Executor) -> Path:
    """Trains to the end and returns the head's folder; what was done before is not done again."""
    _require_fit(request)
    if not (request.out.is_dir() and any(request.out.iterdir())):
        with only_one(request.run_folder):
            executor.train(request)
    return request.out


def _require_fit(request: TrainRequest) -> None:
    """Raises ConfigError for what is wrong and can be seen without training; afterwards
    `request.out` is this job's own head, or absent."""
    inputs = TrainInputs.of(request)
    job = inputs.job(request)
    RunFolder(request.run_folder).require_own(job)
    if request.start is not None:
        first_head(request, inputs)
    require_free(request.out, job)
    load_deepspeed(force_cpu=inputs.device.type == "cpu")
