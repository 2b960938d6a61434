"""A verify rank: runs its shard of layers [N, L), the final norm and the LM head."""

import torch

from eesd_dist.backends.cpu.ahead import wait_for_layers
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import VerifyWeights, load_verify_weights
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.page_store import PageStore, kv_layout
from eesd_dist.engine.verify import VerifyStage, follow_rounds, serve_rounds
from eesd_dist.schedule.page_leases import KvLayout
from eesd_dist.telemetry.round_spans import RoundSpans
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.transport.channel import DistRoundSource
from eesd_dist.transport.contracts import RoundHeader, RoundSource
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import GroupHandle, SingleGroup, UnconnectedGroup
from eesd_dist.transport.memory import OntoDevice
from eesd_dist.workers.epochs.epoch_groups import (
    EpochGroups,
    abort_all,
    all_or_none,
    naming_the_lost,
)
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.loaded_once import PagedOnce
from eesd_dist.workers.messages import Epoch, LoadedRank
from eesd_dist.workers.page_moves import PageMoves
from eesd_dist.workers.process import freeze_heap


class StageVerifier:
    """Implements `roles.RankWorker`; keeps weights and pages from one epoch to the next."""

    def __init__(
        self, config: EngineConfig, tracing: Tracing, *, rank: int, address: str | None = None
    ) -> None:
        """`address`: in place of the node's."""
        torch.set_num_threads(config.parallel.num_threads)
        self._config = config
        self._spans = tracing.rounds
        self._rank = rank
        self._groups = EpochGroups(config, address=address)
        size = config.parallel.verify_tensor_parallel_size
        self._handle = GroupHandle(
            UnconnectedGroup(rank=rank, size=size) if size > 1 else SingleGroup()
        )
        self._stage = PagedOnce(self._load, _stage_of)
        self.loading = LoadWatch()
        self.pages = PageMoves(
            address=self._groups.address,
            store=self._page_store,
            layout=self._kv_layout,
            refusals=self._groups.refusals,
        )

    def prepare(self) -> LoadedRank:
        weights = self._stage.load()
        return LoadedRank(
            weights=weights.span.digest, products=weights.span.products, room=weights.room
        )

    def join(self, epoch: Epoch) -> "VerifyEpoch":
        self.pages.enter(epoch.number)
        with all_or_none() as groups:
            if self._rank == 0:
                groups.append(self._groups.rounds(epoch, rank=1))
            if epoch.num_verify_ranks > 1:
                groups.append(self._groups.stage(epoch, "verify", rank=self._rank))
                self._handle.join(groups[-1])
            stage = self._stage.get(num_pages=epoch.num_pages)
            stage.span.paged.begin()
            # Built now: from here on the drafting actor may send rounds.
            source = self._source(epoch, groups[0]) if self._rank == 0 else None
            return VerifyEpoch(stage, groups, source=source, rank=self._rank, spans=self._spans)

    def disconnect(self) -> None:
        self._groups.leave()

    def _source(self, epoch: Epoch, rounds: ProcessGroup) -> RoundSource:
        source = DistRoundSource(rounds)
        if epoch.shares_gpu or epoch.is_degraded:  # draft probabilities too, which the rounds bring
            return OntoDevice(source, layout_of(self._config).device)
        return source

    def _load(self) -> VerifyWeights:
        wait_for_layers()
        on_progress = self.loading.of(f"verify rank {self._rank}")
        return load_verify_weights(self._config, self._handle, on_progress=on_progress)

    def _page_store(self) -> PageStore:
        return PageStore(self._stage.present("no pages can be moved").span)

    def _kv_layout(self) -> KvLayout:
        weights = self._page_store().weights
        return kv_layout(self._config, layout_of(self._config), weights=weights, head="")


def _stage_of(weights: VerifyWeights, num_pages: int) -> VerifyStage:
    stage = weights.stage(num_pages=num_pages, compiles_in_background=True)
    freeze_heap()
    return stage


class VerifyEpoch:
    """Loop of one verify rank in one epoch."""

    def __init__(
        self,
        stage: VerifyStage,
        groups: list[ProcessGroup],
        *,
        source: RoundSource | None,
        rank: int,
        spans: RoundSpans | None,
    ) -> None:
        """`source` is None except on rank 0. `spans` is None where tracing is off."""
        self._stage = stage
        self._groups = groups
        self._source = source
        self._rank = rank
        self._spans = spans

    def run(self) -> None:
        try:
            with naming_the_lost(self._groups):
                if self._source is not None:
                    serve_rounds(self._stage, self._source, observe=self._record)
                else:
                    follow_rounds(self._stage, observe=self._record)
        finally:
            self.abort()  # so that ranks that wait for this one fail before their deadline

    def number(self) -> int | None:
        # Rank 0 has the rounds' group first; a follower has that of its stage alone.
        return self._groups[0].number

    def abort(self) -> None:
        abort_all(self._groups, "the epoch was ended")

    def _record(self, header: RoundHeader, began_unix_s: float, ended_unix_s: float) -> None:
        if self._spans is None or header.span_id == 0:
            return
        self._spans.record_rank(
            trace_id=int.from_bytes(header.trace_id),
            span_id=header.span_id,
            rank=self._rank,
            num_rows=header.num_rows,
            began_unix_s=began_unix_s,
            ended_unix_s=ended_unix_s,
        )
