"""A verify rank: runs its shard of layers [N, L), the final norm and the LM head."""

import torch

from eesd_dist.config import EngineConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.page_store import PageStore, kv_layout
from eesd_dist.engine.verify import Observe, VerifyStage, follow_rounds, serve_rounds
from eesd_dist.schedule.page_leases import KvLayout
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.transport.channel import DistRoundSource
from eesd_dist.transport.contracts import RoundSource
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.memory import OntoDevice
from eesd_dist.workers.epochs.epoch_groups import (
    EpochGroups,
    abort_all,
    all_or_none,
    naming_the_lost,
)
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.messages import Epoch, LoadedRank
from eesd_dist.workers.page_moves import PageMoves
from eesd_dist.workers.verify_rank import VerifyRank, rank_observer


class StageVerifier:
    """Implements `roles.RankWorker`; keeps weights and pages from one epoch to the next."""

    def __init__(
        self, config: EngineConfig, tracing: Tracing, *, rank: int, address: str | None = None
    ) -> None:
        """`address`: in place of the node's."""
        torch.set_num_threads(config.parallel.num_threads)
        self._config = config
        self._observe = rank_observer(tracing.rounds, rank=rank)
        self._rank = rank
        self._groups = EpochGroups(config, address=address)
        self.loading = LoadWatch()
        self._verify = VerifyRank(config, rank=rank, groups=self._groups, loading=self.loading)
        self.pages = PageMoves(
            address=self._groups.address,
            store=self._page_store,
            layout=self._kv_layout,
            refusals=self._groups.refusals,
        )

    def prepare(self) -> LoadedRank:
        weights = self._verify.load()
        return LoadedRank(
            weights=weights.span.digest, products=weights.span.products, room=weights.room
        )

    def join(self, epoch: Epoch) -> "VerifyEpoch":
        self.pages.enter(epoch.number)
        with all_or_none() as groups:
            if self._rank == 0:
                groups.append(self._groups.rounds(epoch, rank=1))
            if (group := self._verify.connect(epoch)) is not None:
                groups.append(group)
            stage = self._verify.begin(epoch)
            # Built now: from here on the drafting actor may send rounds.
            source = self._source(epoch, groups[0]) if self._rank == 0 else None
            return VerifyEpoch(stage, groups, source=source, observe=self._observe)

    def disconnect(self) -> None:
        self._groups.leave()

    def _source(self, epoch: Epoch, rounds: ProcessGroup) -> RoundSource:
        source = DistRoundSource(rounds)
        if epoch.is_degraded:  # draft probabilities too, which the rounds bring
            return OntoDevice(source, layout_of(self._config).device)
        return source

    def _page_store(self) -> PageStore:
        return PageStore(self._verify.present().span)

    def _kv_layout(self) -> KvLayout:
        weights = self._page_store().weights
        return kv_layout(self._config, layout_of(self._config), weights=weights, head="")


class VerifyEpoch:
    """Loop of one verify rank in one epoch."""

    def __init__(
        self,
        stage: VerifyStage,
        groups: list[ProcessGroup],
        *,
        source: RoundSource | None,
        observe: Observe,
    ) -> None:
        """`source` is None except on rank 0."""
        self._stage = stage
        self._groups = groups
        self._source = source
        self._observe = observe

    def run(self) -> None:
        try:
            with naming_the_lost(self._groups):
                if self._source is not None:
                    serve_rounds(self._stage, self._source, observe=self._observe)
                else:
                    follow_rounds(self._stage, observe=self._observe)
        finally:
            self.abort()  # so that ranks that wait for this one fail before their deadline

    def number(self) -> int | None:
        # Rank 0 has the rounds' group first; a follower has that of its stage alone.
        return self._groups[0].number

    def abort(self) -> None:
        abort_all(self._groups, "the epoch was ended")
