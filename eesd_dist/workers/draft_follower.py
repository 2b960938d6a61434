"""A draft rank other than 0: runs its shard of layers [0, N) and of the exit head on command."""

from pathlib import Path

import torch

from eesd_dist.backends.cpu.ahead import wait_for_layers
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import DraftWeights, head_shelf, load_draft_weights
from eesd_dist.engine.drafting.ranks import DraftShard, HeadShelf, follow_commands
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.page_store import PageStore, kv_layout
from eesd_dist.schedule.page_leases import KvLayout
from eesd_dist.transport.command_stream import DistCommandSource
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import GroupHandle, UnconnectedGroup
from eesd_dist.workers.epochs.epoch_groups import EpochGroups, all_or_none
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.loaded_once import PagedOnce
from eesd_dist.workers.messages import Epoch, LoadedRank
from eesd_dist.workers.page_moves import PageMoves
from eesd_dist.workers.process import freeze_heap


class ShardFollower:
    """Implements `roles.DraftFollower`; keeps weights and pages from one epoch to the next."""

    def __init__(self, config: EngineConfig, *, rank: int, address: str | None = None) -> None:
        """`address`: in place of the node's."""
        torch.set_num_threads(config.parallel.num_threads)
        self._config = config
        self._rank = rank
        self._groups = EpochGroups(config, address=address)
        self._handle = GroupHandle(
            UnconnectedGroup(rank=rank, size=config.parallel.draft_tensor_parallel_size)
        )
        self._loaded = PagedOnce(self._load, self._on_pages)
        self.loading = LoadWatch()
        self.pages = PageMoves(
            address=self._groups.address,
            store=self._page_store,
            layout=self._kv_layout,
            refusals=self._groups.refusals,
        )

    def prepare(self) -> LoadedRank:
        weights = self._loaded.load()
        return LoadedRank(
            weights=weights.span.digest, products=weights.span.products, room=weights.room
        )

    def join(self, epoch: Epoch) -> "FollowerEpoch":
        self.pages.enter(epoch.number)
        with all_or_none() as groups:
            group = self._groups.stage(epoch, "draft", rank=self._rank)
            groups.append(group)
            shard, heads = self._loaded.get(num_pages=epoch.num_pages)
            self._handle.join(group)
            shard.begin()
            return FollowerEpoch(shard, heads, group)

    def disconnect(self) -> None:
        self._groups.leave()

    def load_head(self, folder: str) -> str:
        _, heads = self._loaded.present(f"cannot take {folder}")
        return heads.put_aside(Path(folder)).sha256

    def _load(self) -> DraftWeights:
        wait_for_layers()
        on_progress = self.loading.of(f"draft rank {self._rank}")
        layout = layout_of(self._config)
        return load_draft_weights(self._config, layout, self._handle, on_progress=on_progress)

    def _on_pages(self, weights: DraftWeights, num_pages: int) -> tuple[DraftShard, HeadShelf]:
        heads = head_shelf(self._config, layout_of(self._config), self._handle)
        shard = weights.shard(num_pages=num_pages)
        freeze_heap()
        return shard, heads

    def _page_store(self) -> PageStore:
        shard, _ = self._loaded.present("no pages can be moved")
        return PageStore(shard.span, shard.head)

    def _kv_layout(self) -> KvLayout:
        weights = self._page_store().weights
        return kv_layout(self._config, layout_of(self._config), weights=weights, head="")


class FollowerEpoch:
    """Loop of one draft follower in one epoch."""

    def __init__(self, shard: DraftShard, heads: HeadShelf, group: ProcessGroup) -> None:
        self._shard = shard
        self._heads = heads
        self._group = group
        # Built now: from here on the drafting actor may announce commands.
        self._source = DistCommandSource(group)

    def run(self) -> None:
        try:
            with self._group.raises_lost_peers():
                follow_commands(self._shard, self._source, heads=self._heads)
        finally:
            self.abort()  # so that ranks that wait for this one fail before their deadline

    def number(self) -> int | None:
        return self._group.number

    def abort(self) -> None:
        self._group.abort("the epoch was ended")
