"""Memory that all ranks of a group on one node have mapped.

They pass each other a file descriptor each, through Unix sockets in folders of their own,
while they join; nothing is exchanged afterwards.
"""

import logging
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

from msgspec.msgpack import Decoder, encode

from eesd_dist.transport.contracts import Record

logger = logging.getLogger(__name__)

_LONGEST_S = 10.0
"""Longest wait for a peer's descriptor, which it sends at once."""


class Joining(Protocol):
    """Ranks of a group while they join."""

    @property
    def rank(self) -> int: ...

    def gathered(self, name: str, own_value: bytes) -> tuple[bytes, ...]:
        """Returns every rank's value. Raises PeerLost for a missing rank."""
        ...

    def left_s(self) -> float: ...


class Mapping(Protocol):
    """Addresses of a process that lead to memory."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...

    def free(self) -> None:
        """Gives the addresses back; nothing may use them any more. The memory lives until no
        process has it. Raises RuntimeError."""
        ...


class MemorySource(Protocol):
    """Makes memory that processes of one node can share."""

    refusals: tuple[type[Exception], ...]
    """Errors of `allocate` and `map_peer` where that is not possible, OSError among them."""
    retired: list[Mapping]
    """Mappings without a user, which work that began earlier may still use."""

    def allocate(self, num_bytes: int) -> tuple[Mapping, int]:
        """Returns zeroed memory of at least so many bytes, and a file descriptor by which another
        process maps it, to be closed by the caller."""
        ...

    def map_peer(self, descriptor: int, size: int) -> Mapping:
        """Maps memory of another process."""
        ...

    def synchronize(self) -> None:
        """Waits until what was written is in the memory, and earlier mappings are out of use."""
        ...


class _Offer(Record, frozen=True):
    node: str
    path: str
    """Socket at which the rank's peers leave their descriptors."""
    size: int
    refusal: str
    """Reason why the rank has no such memory; empty if it has."""


_offers = Decoder(_Offer)


class PeerMemory:
    """Maps one rank's memory and that of its peers on the node."""

    def __init__(self, mappings: Sequence[Mapping], retired: list[Mapping]) -> None:
        """`retired`: where the mappings go when this object is not used any more."""
        self.addresses = tuple(mapping.address for mapping in mappings)
        """Addresses of the memory of every rank of the node, in rank order."""
        # Frees nothing now: work that was queued or is running may use it.
        weakref.finalize(self, retired.extend, mappings).atexit = False


def share_memory(
    num_bytes: int, *, source: MemorySource, node: str, joining: Joining, over_nodes: bool = False
) -> PeerMemory | str:
    """Returns zeroed memory of so many bytes a rank, or the reason why there is none: every rank
    gets memory, or every rank the same reason. Raises PeerLost for a missing rank.

    `over_nodes`: ranks of several nodes have that of their own node, if each node has as many
    ranks, a power of two and in a row.
    """
    source.synchronize()
    _free_retired(source.retired)
    with ExitStack() as stack:
        own: Mapping | None = None
        descriptor, refusal, path = -1, "", ""
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="eesd-"))
            own, descriptor = source.allocate(num_bytes)
            stack.callback(os.close, descriptor)
            path = os.path.join(folder, "memory")
            listener.bind(path)
            listener.listen(64)
            source.synchronize()  # zeroed before a peer writes
        except source.refusals as error:
            refusal = str(error)
        offer = _Offer(f"{_boot()} {node}", path, own.size if own else 0, refusal)
        offers = [_offers.decode(report) for report in joining.gathered("memory", encode(offer))]
        reason = _first(offer.refusal for offer in offers)
        peers = _peers([offer.node for offer in offers], joining.rank)
        if len(peers) < len(offers) and not over_nodes:
            reason = "its ranks are on several nodes"
        elif len(peers) < 2 <= len(offers):
            reason = "its ranks are on several nodes, and not 2, 4 or 8 in a row on each"
        elif len({offer.size for offer in offers}) > 1:
            reason = reason or "its ranks allocate in different steps"
        mappings: list[Mapping] = []
        if not reason:
            assert own is not None
            refusal = ""
            try:
                paths = {peer: offers[peer].path for peer in peers}
                mappings = _exchanged(own, descriptor, paths, listener, joining, source)
            except source.refusals as error:
                refusal = f"rank {joining.rank}: {error}"
            refusals = joining.gathered("memory mapped", refusal.encode())
            reason = _first(report.decode() for report in refusals)
        if not reason:
            return PeerMemory(mappings, source.retired)
        source.retired.extend(mappings or ([own] if own else []))
        return reason


def _exchanged(
    own: Mapping,
    descriptor: int,
    paths: dict[int, str],
    listener: socket.socket,
    joining: Joining,
    source: MemorySource,
) -> list[Mapping]:
    """Returns the memory of the ranks with these sockets. Raises one of `source.refusals`."""
    deadline = time.monotonic() + min(joining.left_s() / 2, _LONGEST_S)
    for peer, path in paths.items():
        if peer != joining.rank:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(max(deadline - time.monotonic(), 0.1))
                connection.connect(path)
                socket.send_fds(connection, [joining.rank.to_bytes(4)], [descriptor])
    mappings: dict[int, Mapping] = {joining.rank: own}
    try:
        while len(mappings) < len(paths):
            listener.settimeout(max(deadline - time.monotonic(), 0.1))
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(max(deadline - time.monotonic(), 0.1))
                message, received, _, _ = socket.recv_fds(connection, 4, 1)
            try:
                if len(message) < 4 or not received:
                    raise OSError("a peer sent no memory")
                peer = int.from_bytes(message)
                mappings[peer] = source.map_peer(received[0], own.size)
            finally:
                for descriptor in received:
                    os.close(descriptor)
    except BaseException:
        source.retired.extend(mapping for peer, mapping in mappings.items() if peer != joining.rank)
        raise
    return [mappings[peer] for peer in paths]


def _peers(nodes: Sequence[str], rank: int) -> range:
    """Returns the ranks of a rank's node, itself among them: that rank alone, unless all nodes have
    as many ranks, a power of two and in a row."""
    num_nodes = len(set(nodes))
    per_node, remaining = divmod(len(nodes), num_nodes)
    blocks = [set(nodes[first : first + per_node]) for first in range(0, len(nodes), per_node)]
    if remaining or any(len(block) > 1 for block in blocks):
        return range(rank, rank + 1)
    if num_nodes > 1 and per_node & (per_node - 1):
        return range(rank, rank + 1)
    first = rank // per_node * per_node
    return range(first, first + per_node)


def _free_retired(retired: list[Mapping]) -> None:
    unused, retired[:] = retired[:], []
    for mapping in unused:
        try:
            mapping.free()
        except RuntimeError:
            logger.exception("memory of a former group could not be freed")


def _boot() -> str:
    """Returns what tells machines apart, in addition to their addresses."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _first(reasons: Iterable[str]) -> str:
    return next((reason for reason in reasons if reason), "")
