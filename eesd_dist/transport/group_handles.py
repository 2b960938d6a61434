"""Groups without connections, and the handle that a rank keeps across epochs.

`SingleGroup` is a stage of one rank. `UnconnectedGroup` is one rank of several before it has joined
an epoch. `GroupHandle` refers to the group of the present epoch.
"""

from typing import Protocol

from torch import Tensor

from eesd_dist.errors import PeerLost
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.counts import GroupCounts
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.host_sums import HostSums
from eesd_dist.transport.thread_group import ThreadGroup


class SingleGroup:
    """The group of a stage of one rank: nothing to exchange."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return x

    def counts(self) -> GroupCounts:
        return GroupCounts(by_kind={})


class UnconnectedGroup:
    """The group of a rank before it is connected to its peer ranks: weights can be loaded, and
    every collective raises PeerLost. A stage of one rank needs no connection."""

    def __init__(self, *, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise self._without_peers("all_reduce")

    def all_gather(self, x: Tensor) -> list[Tensor]:
        raise self._without_peers("all_gather")

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        raise self._without_peers("broadcast")

    def counts(self) -> GroupCounts:
        return GroupCounts(by_kind={})

    def _without_peers(self, operation: str) -> PeerLost:
        return PeerLost(
            peer=f"the other {self._size - 1} ranks",
            operation=operation,
            reason="not connected: join an epoch first",
        )


AnyGroup = SingleGroup | UnconnectedGroup | ProcessGroup | ThreadGroup


class GroupHandle:
    """Refers to a rank's group of the present epoch, so that layers loaded once keep working when
    the group is replaced."""

    def __init__(self, group: AnyGroup) -> None:
        self._rank, self._size = group.rank, group.size
        self._group = group

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def current(self) -> AnyGroup:
        return self._group

    def join(self, group: AnyGroup) -> None:
        """Switches to the next epoch's group, which has the same rank and size."""
        assert (group.rank, group.size) == (self._rank, self._size), "a shard belongs to its rank"
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._group.all_gather(x)

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        return self._group.broadcast(x, source=source)

    def counts(self) -> GroupCounts:
        """Returns the counts of the present epoch."""
        return self._group.counts()


class HostGroup(Protocol):
    """Ranks of one host that sum inside of compiled calls."""

    @property
    def host_sums(self) -> HostSums: ...

    def finish_sums(self) -> None:
        """Counts the sums of a call. Raises PeerLost if a rank's part did not come."""
        ...


def host_group_of(group: TensorGroup) -> HostGroup | None:
    """Returns the group of the present epoch, if its ranks sum inside of compiled calls: the same
    answer on every rank."""
    if isinstance(group, GroupHandle):
        group = group.current
    if isinstance(group, ProcessGroup | ThreadGroup) and group.size > 1 and group.sums_on_host:
        return group
    return None


def process_group_of(group: TensorGroup) -> ProcessGroup | None:
    """Returns the processes of the present epoch; None for a group of one rank, of threads, or
    without connections."""
    if isinstance(group, GroupHandle):
        group = group.current
    return group if isinstance(group, ProcessGroup) and group.size > 1 else None
