"""The mode of a pipeline's processes, and the GPUs of each, as the cluster's GPUs allow."""

from collections.abc import Callable
from dataclasses import dataclass

from eesd_dist.config import ParallelConfig
from eesd_dist.workers.messages import PlacementMode
from serve_app.placement_config import PlacementConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Mode and GPUs of a pipeline's processes, as far as the cluster's GPUs decide them."""

    mode: PlacementMode
    gpus_per_rank: float
    """GPUs of a bundle that states none."""


def gpu_plan(
    placement: PlacementConfig,
    parallel: ParallelConfig,
    *,
    num_gpus: float,
    needs_gpu: bool,
    may_grow: Callable[[], bool],
) -> GpuPlan:
    """Returns the configured mode, or the one for which the GPUs of the cluster are enough.

    `num_gpus`: all of them; `needs_gpu`: the device is set to CUDA; `may_grow`: says whether an
    autoscaler may add more. Stages that the configuration keeps apart are never put into one
    process.
    """
    gpus_per_rank = 1.0 if num_gpus or needs_gpu else 0.0
    if placement.mode is not None:
        return GpuPlan(mode=placement.mode, gpus_per_rank=gpus_per_rank)
    lacks_gpu = parallel.num_ranks - 1 <= num_gpus < parallel.num_ranks
    may_share = lacks_gpu and not parallel.fallback and not _keeps_apart(placement)
    is_shared = may_share and not may_grow()
    return GpuPlan(mode="shared" if is_shared else "dedicated", gpus_per_rank=gpus_per_rank)


def _keeps_apart(placement: PlacementConfig) -> bool:
    """Returns whether the stages have other nodes or GPUs by a setting."""
    draft, verify = placement.draft, placement.verify
    return (
        {placement.stages, placement.strategy} & {"SPREAD", "STRICT_SPREAD"} != set()
        or (draft.labels, draft.resources) != (verify.labels, verify.resources)
        or draft.num_gpus is not None
        or verify.num_gpus is not None
    )
