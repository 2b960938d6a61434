"""Counts of what the ranks of a group exchanged, by kind of operation: number, bytes, seconds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from eesd_dist.types import NO_TRAFFIC, Traffic

WHOLE_BYTES = 256 * 1024
"""Largest tensor that is summed by one exchange of all data; of a larger one each rank sums one
share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCounts:
    """Counts of one kind of operation since its group was built."""

    number: int
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Counts of one rank in its group so far.

    On the CPU bytes are those given to the sockets, or written for the other ranks of the host. On
    a GPU they are estimated as for a ring, since NCCL does not report them, and seconds are not
    measured.
    """

    by_kind: Mapping[str, OperationCounts]
    """Kinds are `all_reduce`, `all_gather`, `broadcast`, and one for each stream of messages."""

    @property
    def total(self) -> Traffic:
        return _total_of([counts.traffic for counts in self.by_kind.values()])


class Tally:
    """The running counts of one kind of operation; written by one thread at a time."""

    __slots__ = ("kind", "number", "received_bytes", "sent_bytes", "wait_s")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.number = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.wait_s = 0.0

    def read(self) -> OperationCounts:
        return OperationCounts(
            number=self.number,
            traffic=Traffic(
                sent_bytes=self.sent_bytes,
                received_bytes=self.received_bytes,
                wait_s=self.wait_s,
            ),
        )

    def set(self, counts: OperationCounts) -> None:
        self.number = counts.number
        self.sent_bytes = counts.traffic.sent_bytes
        self.received_bytes = counts.traffic.received_bytes
        self.wait_s = counts.traffic.wait_s


class CapturedCounts:
    """Counts of the work of a CUDA graph, which each of its replays does again."""

    def __init__(self) -> None:
        self._by_tally: list[tuple[Tally, OperationCounts]] = []

    def take_back(self, tally: Tally, before: OperationCounts) -> None:
        """Sets a tally back to what it was before the capture."""
        total = tally.read()
        tally.set(before)
        counts = OperationCounts(
            number=total.number - before.number, traffic=total.traffic.since(before.traffic)
        )
        self._by_tally.append((tally, counts))

    def add(self) -> None:
        """Counts the work of a replay."""
        for tally, counts in self._by_tally:
            tally.number += counts.number
            tally.sent_bytes += counts.traffic.sent_bytes
            tally.received_bytes += counts.traffic.received_bytes


@contextmanager
def captured_counts(tallies: Sequence[Tally]) -> Iterator[CapturedCounts]:
    """Counts nothing of what is captured inside of the block; yields the counts of a replay."""
    before = [tally.read() for tally in tallies]
    captured = CapturedCounts()
    try:
        yield captured
    finally:
        for tally, counts in zip(tallies, before, strict=True):
            captured.take_back(tally, counts)


def _total_of(traffics: Sequence[Traffic]) -> Traffic:
    if not traffics:
        return NO_TRAFFIC
    return Traffic(
        sent_bytes=sum(traffic.sent_bytes for traffic in traffics),
        received_bytes=sum(traffic.received_bytes for traffic in traffics),
        wait_s=sum(traffic.wait_s for traffic in traffics),
    )


def bytes_of_sum(size_bytes: int, *, size: int) -> int:
    """Returns the bytes that each rank sends, and receives, for a sum of a tensor of this size."""
    if size_bytes <= WHOLE_BYTES:
        return size_bytes * (size - 1)
    return 2 * size_bytes * (size - 1) // size
