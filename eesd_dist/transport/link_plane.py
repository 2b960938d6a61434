"""Transfers between the CPUs of one epoch of one group, over a link to each of its ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from eesd_dist.transport.link import Link, Sending, bytes_of


class Receiving:
    """A message to be received into a tensor, read by the thread that waits for it."""

    __slots__ = ("_into", "_link", "_tag")

    def __init__(self, link: Link, x: Tensor, *, tag: int) -> None:
        self._link = link
        self._into = bytes_of(x)
        self._tag = tag

    def wait(self, *, timeout_s: float | None) -> None:
        """None waits as long as the connection lives. Raises OSError."""
        self._link.receive(tag=self._tag, timeout_s=timeout_s, into=self._into)


class LinkPlane:
    """Links of one rank to the other ranks of its group."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = dict(links)

    def isend(
        self, buffers: Sequence[memoryview], *, to: int, tag: int, confirmed: bool
    ) -> Sending:
        """Starts to send these bytes as one message. Waiting for it lasts until the kernel has it
        or, if it is `confirmed`, until the peer has taken it. Raises ConnectionError."""
        return self._links[to].send(buffers, tag=tag, confirmed=confirmed)

    def irecv(self, x: Tensor, *, source: int, tag: int) -> Receiving:
        """Returns the transfer of the next message with this tag into `x`, which is contiguous.
        Transfers of one tag are waited for in the order of their messages."""
        return Receiving(self._links[source], x, tag=tag)

    def receive(self, *, source: int, tag: int, timeout_s: float | None) -> memoryview:
        """Returns the next message with this tag. Raises OSError."""
        return self._links[source].receive(tag=tag, timeout_s=timeout_s)

    def call_when_gone(self, act: Callable[[int], None]) -> None:
        """Calls this with each peer when the connection to it has ended."""
        for peer, link in self._links.items():
            link.call_when_gone(partial(act, peer))

    def abort(self) -> None:
        """Ends all transfers in progress, here and at the peers."""
        for link in self._links.values():
            link.end()
