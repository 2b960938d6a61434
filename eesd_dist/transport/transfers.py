"""Sends and receives in progress between the ranks of a `ProcessGroup`."""

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from eesd_dist.errors import PeerLost
from eesd_dist.transport.counts import Tally


class Tag(IntEnum):
    """Streams of messages between one pair of ranks; messages of one stream stay in order."""

    COLLECTIVE = 0
    ROUND = 1
    REPLY = 2
    SHARE = 3
    PAGES = 4


class Pending(Protocol):
    """A transfer between two CPUs in progress."""

    def wait(self, *, timeout_s: float | None) -> None:
        """None waits as long as the connection lives. Raises OSError."""
        ...


class TransferGroup(Protocol):
    """The group of a transfer's two ends."""

    def check(self) -> None:
        """Raises PeerLost when work on the GPU was aborted."""
        ...

    def peer_lost(self, error: OSError, *, peer: int, operation: str, waited_s: float) -> PeerLost:
        """Returns the error of a wait for this peer."""
        ...


class Transfer:
    """A send or receive in progress. It owns what is transferred until `finish` returns."""

    __slots__ = (
        "_arrivals",
        "_content",
        "_group",
        "_operation",
        "_peer",
        "_pending",
        "_received_bytes",
        "_tally",
    )

    def __init__(
        self,
        group: TransferGroup,
        pending: Pending | None,
        content: object,
        *,
        peer: int,
        operation: str,
        tally: Tally,
        received_bytes: int = 0,
        arrivals: int = 0,
    ) -> None:
        """`pending`: None on a GPU; `received_bytes`, `arrivals`: bytes that a receive brings, and
        the number of operations that it completes."""
        self._group = group
        self._pending = pending
        self._content = content
        self._peer = peer
        self._operation = operation
        self._tally = tally
        self._received_bytes = received_bytes
        self._arrivals = arrivals

    def finish(self, *, timeout_s: float | None) -> None:
        """Waits for the transfer; None waits as long as the peer lives. Raises PeerLost."""
        if self._pending is None:  # ordered on the stream, watched by the plane
            self._group.check()
        else:
            self._wait(self._pending, timeout_s)
        self._tally.received_bytes += self._received_bytes
        self._tally.number += self._arrivals

    def _wait(self, pending: Pending, timeout_s: float | None) -> None:
        started_s = time.perf_counter()
        try:
            pending.wait(timeout_s=timeout_s)
        except OSError as error:
            raise self._group.peer_lost(
                error,
                peer=self._peer,
                operation=self._operation,
                waited_s=time.perf_counter() - started_s,
            ) from error
        if timeout_s is not None:
            self._tally.wait_s += time.perf_counter() - started_s


def finish_all(transfers: Sequence[Transfer], *, timeout_s: float) -> None:
    """Waits for all of them within one deadline."""
    deadline = time.monotonic() + timeout_s
    for transfer in transfers:
        transfer.finish(timeout_s=deadline - time.monotonic())
