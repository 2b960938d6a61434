"""Builds the process groups of one rank for each epoch.

Groups are called `rounds` (drafting actor and verify rank 0, where they are two processes),
`verify` and `draft` (the ranks of a stage that has several). An epoch owns its groups: they are
built together and end together.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import ray
import torch

from eesd_dist.config import EngineConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.transport.authentication.key_store import StoreClient, StoreHost
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.rendezvous import build_group
from eesd_dist.workers.messages import Address, Epoch, StageName

_DRAFTER = "draft rank 0"


class EpochGroups:
    """Owns the rendezvous of one process: the stores it hosts and the groups it is joining."""

    def __init__(self, config: EngineConfig, *, address: str | None = None) -> None:
        """`address`: the one at which other ranks reach this process; None: its node's."""
        self._config = config
        self.address = address or ray.util.get_node_ip_address()
        self._hosted: list[StoreHost] = []
        """The newest store hosted here, if any."""
        self._connecting: set[StoreClient] = set()
        """Connections to stores at which groups are being built."""
        self.refusals = RefusedConnections()

    def host_store(self) -> Address:
        store = StoreHost(address=self.address, refusals=self.refusals)
        self._hosted = [store]
        return store.at

    def rounds(self, epoch: Epoch, *, rank: int) -> ProcessGroup:
        """Joins the drafting actor (0) and verify rank 0 (1)."""
        return self._build(epoch, "rounds", rank, (_DRAFTER, "verify rank 0"), sums=False)

    def stage(self, epoch: Epoch, stage: StageName, *, rank: int) -> ProcessGroup:
        """Joins the ranks of a stage with several."""
        names: tuple[str, ...]
        if stage == "draft":
            names = (_DRAFTER, *(f"draft rank {r}" for r in range(1, epoch.num_draft_ranks)))
        else:
            names = tuple(f"verify rank {r}" for r in range(epoch.num_verify_ranks))
        return self._build(epoch, stage, rank, names, sums=True)

    def leave(self) -> None:
        """Makes joins that wait for their peers raise PeerLost. From any thread."""
        for store in tuple(self._connecting):
            store.close()

    def _build(
        self, epoch: Epoch, name: str, rank: int, members: tuple[str, ...], *, sums: bool
    ) -> ProcessGroup:
        """`sums`: the group sums, in memory where it can; else it sends and receives alone."""
        device = self._device_of(epoch, name)
        store = StoreClient(epoch.store)
        self._connecting.add(store)
        try:
            store.connect(timeout_s=epoch.timeout_s)
            return build_group(
                store,
                epoch=epoch.number,
                name=name,
                rank=rank,
                size=len(members),
                timeout_s=epoch.timeout_s,
                device=device,
                address=self.address,
                members=members,
                ordered_sums=self._config.model.numerics == "invariant",
                in_memory=sums,
                refusals=self.refusals,
            )
        finally:
            self._connecting.discard(store)

    def _device_of(self, epoch: Epoch, group: str) -> torch.device:
        """Returns the device of the tensors that this group sends. Raises ConfigError."""
        through_host = epoch.is_degraded and group == "rounds"
        return torch.device("cpu") if through_host else layout_of(self._config).device


@contextmanager
def all_or_none() -> Iterator[list[ProcessGroup]]:
    """Collects the groups of one epoch. When the block raises, all of them are aborted, since they
    hold GPU memory."""
    groups: list[ProcessGroup] = []
    try:
        yield groups
    except BaseException:
        abort_all(groups, "its epoch could not be started")
        raise


def abort_all(groups: Sequence[ProcessGroup], reason: str) -> None:
    for group in groups:
        group.abort(reason)


@contextmanager
def naming_the_lost(groups: Sequence[ProcessGroup]) -> Iterator[None]:
    """Raises a failure of one of these groups as PeerLost that names the lost rank."""
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(group.raises_lost_peers())
        yield
