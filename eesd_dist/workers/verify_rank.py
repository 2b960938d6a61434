"""Weights, pages and group of one verify rank, kept from one epoch to the next.

`StageVerifier` runs it in a process of its own, `EngineLeader` runs rank 0 in the drafting actor's.
"""

from eesd_dist.backends.cpu.ahead import wait_for_layers
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import VerifyWeights, load_verify_weights
from eesd_dist.engine.verify import Observe, VerifyStage
from eesd_dist.telemetry.round_spans import RoundSpans
from eesd_dist.transport.contracts import RoundHeader
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import GroupHandle, SingleGroup, UnconnectedGroup
from eesd_dist.workers.epochs.epoch_groups import EpochGroups
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.loaded_once import PagedOnce
from eesd_dist.workers.messages import Epoch
from eesd_dist.workers.process import freeze_heap


class VerifyRank:
    """A rank's part of the verify stage."""

    def __init__(
        self, config: EngineConfig, *, rank: int, groups: EpochGroups, loading: LoadWatch
    ) -> None:
        self._config = config
        self._rank = rank
        self._groups = groups
        self._loading = loading
        size = config.parallel.verify_tensor_parallel_size
        self._handle = GroupHandle(
            UnconnectedGroup(rank=rank, size=size) if size > 1 else SingleGroup()
        )
        self._stage = PagedOnce(self._load, _stage_of)

    def load(self) -> VerifyWeights:
        """Loads the weights, unless they are loaded. Raises CheckpointError or ConfigError."""
        return self._stage.load()

    def connect(self, epoch: Epoch) -> ProcessGroup | None:
        """Joins the other verify ranks and returns their group; None where there are none."""
        if epoch.num_verify_ranks == 1:
            return None
        group = self._groups.stage(epoch, "verify", rank=self._rank)
        self._handle.join(group)
        return group

    def begin(self, epoch: Epoch) -> VerifyStage:
        """Returns the stage with its pages; none of them is valid in the new epoch."""
        stage = self._stage.get(num_pages=epoch.num_pages)
        stage.span.paged.begin()
        return stage

    def present(self) -> VerifyStage:
        """Returns the stage. Raises EngineError while it is being built."""
        return self._stage.present("no pages can be moved")

    def _load(self) -> VerifyWeights:
        wait_for_layers()
        on_progress = self._loading.of(f"verify rank {self._rank}")
        return load_verify_weights(self._config, self._handle, on_progress=on_progress)


def _stage_of(weights: VerifyWeights, num_pages: int) -> VerifyStage:
    stage = weights.stage(num_pages=num_pages, compiles_in_background=True)
    freeze_heap()
    return stage


def rank_observer(spans: RoundSpans | None, *, rank: int) -> Observe:
    """Returns what writes the rank's span of each traced round; `spans` is None where tracing is
    off."""

    def observe(header: RoundHeader, began_unix_s: float, ended_unix_s: float) -> None:
        if spans is None or header.span_id == 0:
            return
        spans.record_rank(
            trace_id=int.from_bytes(header.trace_id),
            span_id=header.span_id,
            rank=rank,
            num_rows=header.num_rows,
            began_unix_s=began_unix_s,
            ended_unix_s=ended_unix_s,
        )

    return observe
