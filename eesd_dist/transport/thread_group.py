"""A stage's ranks as threads of one process: the collectives of a `ProcessGroup` without a network.

Sums are taken in pairs and rounded once, as in a `ProcessGroup`, so that ranks in threads and ranks
in processes compute the same bits, on any device. Every wait has a deadline, and its error
names the ranks that did not take part. The commands of a draft stage go through queues: a follower
waits for one as long as the stream is open, or as long as a test says. Used by
`eesd_dist.bench.fuzz` and by tests.
"""

import queue
import threading
import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from eesd_dist.errors import PeerLost, WireError
from eesd_dist.transport.commands import Command
from eesd_dist.transport.counts import GroupCounts, Tally
from eesd_dist.transport.host_sums import HostSums, has_futex
from eesd_dist.transport.rank_sums import pairwise_sum
from eesd_dist.transport.sum_layout import MEMORY_BYTES, MOST_RANKS

DEFAULT_TIMEOUT_S = 20.0


class _Meeting:
    """Shared state through which the threads of one group exchange tensors.

    Two sets of slots are used alternately. A rank that writes one set has seen every rank arrive at
    the collective before it, so no rank still reads what it overwrites.
    """

    def __init__(self, *, members: Sequence[str], timeout_s: float) -> None:
        self.members = tuple(members)
        self.timeout_s = timeout_s
        self._condition = threading.Condition()
        self._slots: tuple[list[Tensor | None], ...] = (
            [None] * len(members),
            [None] * len(members),
        )
        self._arrived = [0] * len(members)
        self._reason: str | None = None
        """Reason why the group was aborted; None while it is not."""
        self._memory = np.zeros((len(members), MEMORY_BYTES), np.uint8)

    def host_sums(self, *, rank: int) -> HostSums:
        """Returns a rank's sums inside of compiled calls."""
        addresses = [int(memory.ctypes.data) for memory in self._memory]
        return HostSums(self._memory, tuple(addresses), rank=rank, timeout_s=self.timeout_s)

    def exchange(self, x: Tensor, *, rank: int, operation: str) -> list[Tensor]:
        """Returns every rank's x, in rank order. All ranks share the tensors: do not write them."""
        with self._condition:
            self._refuse_if_ended(operation)
            self._arrived[rank] += 1
            turn = self._arrived[rank]
            slots = self._slots[turn % 2]
            slots[rank] = x
            if min(self._arrived) == turn:
                self._condition.notify_all()
            else:
                self._wait_for_all(turn, operation=operation)
            return [self._part(slot, x, operation=operation) for slot in slots]

    def lost(self, rank: int, *, operation: str, reason: str) -> PeerLost:
        """Returns the error of a wait for a rank that ended with this reason."""
        with self._condition:
            self._refuse_if_ended(operation)
        return PeerLost(peer=self.members[rank], operation=operation, reason=reason)

    def abort(self, reason: str) -> None:
        with self._condition:
            if self._reason is None:
                self._reason = reason
            self._condition.notify_all()

    def _wait_for_all(self, turn: int, *, operation: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while min(self._arrived) < turn:
            self._refuse_if_ended(operation)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                missing = [
                    name
                    for name, arrived in zip(self.members, self._arrived, strict=True)
                    if arrived < turn
                ]
                raise PeerLost(
                    peer=" or ".join(missing),
                    operation=operation,
                    reason=f"no answer within {self.timeout_s:g} s",
                )
            self._condition.wait(left_s)

    def _refuse_if_ended(self, operation: str) -> None:
        if self._reason is not None:
            raise PeerLost(peer="the other ranks", operation=operation, reason=self._reason)

    def _part(self, other: Tensor | None, own: Tensor, *, operation: str) -> Tensor:
        assert other is not None, "every rank has arrived"
        if other.shape != own.shape or other.dtype != own.dtype:
            raise WireError(
                f"{operation}: found {tuple(other.shape)} x {other.dtype} from another rank, "
                f"expected {tuple(own.shape)} x {own.dtype}"
            )
        return other


class ThreadGroup:
    """A rank's view of a group of threads of this process."""

    def __init__(self, *, rank: int, meeting: _Meeting, in_memory: bool) -> None:
        self._rank = rank
        self._meeting = meeting
        self._tallies = {kind: Tally(kind) for kind in ("all_reduce", "all_gather", "broadcast")}
        self.host_sums = meeting.host_sums(rank=rank)
        self._in_memory = in_memory

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._meeting.members)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums in place, in pairs; the same bits on every rank."""
        if self.size == 1:
            return x
        return x.copy_(pairwise_sum(self._exchange(x.clone(), kind="all_reduce")))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [
            contribution.clone() for contribution in self._exchange(x.clone(), kind="all_gather")
        ]

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        """Returns `source`'s x on every rank; receivers' x is overwritten."""
        contributions = self._exchange(x.clone(), kind="broadcast")
        return x if self._rank == source else x.copy_(contributions[source])

    @property
    def sums_on_host(self) -> bool:
        """True if compiled calls sum over the ranks."""
        return self._in_memory and self.size <= MOST_RANKS and has_futex()

    def finish_sums(self) -> None:
        """Counts the sums of a compiled call. Raises PeerLost if a rank was lost."""
        self.host_sums.count(self._tallies["all_reduce"])
        lost = self.host_sums.lost
        if lost is not None:
            raise self._meeting.lost(lost.rank, operation="all_reduce", reason=lost.reason)

    def counts(self) -> GroupCounts:
        """Returns a snapshot. From any thread."""
        used = [tally for tally in self._tallies.values() if tally.number]
        return GroupCounts(by_kind={tally.kind: tally.read() for tally in used})

    def abort(self, reason: str = "the group was aborted") -> None:
        """Wakes every rank that waits in this group. From any thread."""
        self._meeting.abort(reason)
        self.host_sums.abort()

    def _exchange(self, x: Tensor, *, kind: str) -> list[Tensor]:
        tally = self._tallies[kind]
        tally.number += 1
        tally.sent_bytes += x.nbytes * (self.size - 1)
        tally.received_bytes += x.nbytes * (self.size - 1)
        started_s = time.perf_counter()
        contributions = self._meeting.exchange(x, rank=self._rank, operation=kind)
        tally.wait_s += time.perf_counter() - started_s
        return contributions


def thread_group(
    size: int,
    *,
    name: str = "thread",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    in_memory: bool = True,
) -> list[ThreadGroup]:
    """Returns the views of all ranks, in rank order; `name` is the stage's name in errors;
    `in_memory`: compiled calls sum over the ranks."""
    meeting = _Meeting(members=[f"{name} rank {rank}" for rank in range(size)], timeout_s=timeout_s)
    return [ThreadGroup(rank=rank, meeting=meeting, in_memory=in_memory) for rank in range(size)]


CommandQueue = queue.SimpleQueue[Command | None]


class ThreadCommandSink:
    """Sends commands to followers that are threads of this process."""

    def __init__(self, queues: Sequence[CommandQueue]) -> None:
        self._queues = tuple(queues)

    def join(self, queues: Sequence[CommandQueue]) -> None:
        """Switches to the next epoch's followers, as many as before."""
        assert len(queues) == len(self._queues), "a stage keeps its number of ranks"
        self._queues = tuple(queues)

    def announce(self, command: Command) -> None:
        for waiting in self._queues:
            waiting.put(command)

    def check(self) -> None:
        return

    def close(self) -> None:
        for waiting in self._queues:
            waiting.put(None)


class ThreadCommandSource:
    """A follower's end."""

    def __init__(self, commands: CommandQueue, *, timeout_s: float | None = None) -> None:
        """`timeout_s` None: waits as long as the stream is open."""
        self._commands = commands
        self._timeout_s = timeout_s

    def next_command(self) -> Command | None:
        try:
            return self._commands.get(timeout=self._timeout_s)
        except queue.Empty:
            reason = f"no command within {self._timeout_s:g} s"
            raise PeerLost(
                peer="the leading thread", operation="waiting for a command", reason=reason
            ) from None


def command_queues(num_followers: int) -> list[CommandQueue]:
    """Returns one queue for each follower."""
    return [queue.SimpleQueue() for _ in range(num_followers)]
