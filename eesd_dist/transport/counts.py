"""Counts of what the ranks of a group exchanged, by kind of operation: number, bytes, seconds."""

from collections.abc import Mapping, Sequence
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

    On the CPU bytes are those given to the sockets. On a GPU they are estimated as for a ring,
    since NCCL does not report them, and seconds are not measured.
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
