"""Transfer of KV pages between two ranks, in chunks that are checked before they are written.

Both ends know in advance which pages of how many layers are transferred, and cut them into the same
chunks. A chunk's header, a message in the format of `wire`, identifies it. Anything but the
expected chunk is a WireError before a byte is written: version, KV migration, layers, pages and
size are compared, then the checksum of the bytes. The receiver confirms each chunk once it is
written, so that both ends know of progress and hold few chunks at a time. No chunk is larger than
`MAX_CHUNK_BYTES`, unless a single page of a single layer is.

Bytes travel on the group's device: over NCCL from one GPU to another, else over a link. Headers and
confirmations are on the host. Callers decide what the bytes mean and where they are stored.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from msgspec.msgpack import Decoder
from torch import Tensor

from eesd_dist.errors import PeerLost, WireError
from eesd_dist.schedule.page_leases import PageTraffic
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import Record, Unsigned
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.transfers import Tag, Transfer
from eesd_dist.types import Count

MAX_CHUNK_BYTES = 8 << 20
_WINDOW = 2
"""Chunks that were sent and are not confirmed. With the one that is being read, and its layers, a
sender holds at most four chunks (32 MiB), a receiver two, and the layer that it writes."""
_WORD_BYTES = 8


class Chunk(Record, frozen=True, kw_only=True):
    """Layers [first_layer, last_layer) of pages [first_page, last_page) of a list of pages."""

    first_layer: Count
    last_layer: Count
    first_page: Count
    last_page: Count
    size_bytes: Count


class _Header(Record, frozen=True, kw_only=True):
    """Identifies a chunk; without a chunk, confirms that this one is written."""

    migration: str
    index: Count
    num_chunks: Count
    chunk: Chunk | None
    checksum: Unsigned
    """0 without a chunk."""


_headers = Decoder(_Header)


Read = Callable[[Chunk], Tensor]
"""Returns the bytes of a chunk, on any device: the group's device is where they are sent from."""
Write = Callable[[Chunk, Tensor], None]


def chunks_of(
    page_bytes: Sequence[int], num_pages: int, *, max_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[Chunk]:
    """Yields chunks with all layers of as many pages as fit; when a single page does not fit, with
    as many of its layers as fit.

    `page_bytes`: size of one page in each layer.
    """
    per_page = sum(page_bytes)
    at_once = max(1, max_bytes // per_page) if per_page else max(1, num_pages)
    for first_page in range(0, num_pages, at_once):
        last_page = min(first_page + at_once, num_pages)
        for first, last in _runs(page_bytes, max_bytes):
            yield Chunk(
                first_layer=first,
                last_layer=last,
                first_page=first_page,
                last_page=last_page,
                size_bytes=sum(page_bytes[first:last]) * (last_page - first_page),
            )


def _runs(page_bytes: Sequence[int], max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields runs of layers that fit with one page each; a layer that is too large is a run."""
    first = size = 0
    for layer, layer_bytes in enumerate(page_bytes):
        if layer > first and size + layer_bytes > max_bytes:
            yield first, layer
            first, size = layer, 0
        size += layer_bytes
    if first < len(page_bytes):
        yield first, len(page_bytes)


def send_pages(
    group: ProcessGroup,
    read: Read,
    *,
    page_bytes: Sequence[int],
    num_pages: int,
    number: str,
    timeout_s: float,
) -> PageTraffic:
    """Sends the pages from rank 0 of a group of two, and waits until rank 1 has written them.

    Raises PeerLost when all of that takes longer than `timeout_s`, WireError for any other answer.
    """
    clock = _Clock(group, timeout_s=timeout_s)
    chunks = list(chunks_of(page_bytes, num_pages))
    unconfirmed: deque[tuple[int, list[Transfer]]] = deque()

    def confirm_oldest() -> None:
        index, transfers = unconfirmed.popleft()
        clock.finish(transfers)
        answer = clock.receive(source=1, operation=_chunk_name(index))
        _expect(_written(chunks, index, number=number), answer, group)

    for index, chunk in enumerate(chunks):
        content_B = read(chunk).to(group.device)  # while the chunks before it are being sent
        if len(unconfirmed) == _WINDOW:
            confirm_oldest()
        header = _encode(_header_of(chunks, index, content_B, number=number), group)
        name = _chunk_name(index)
        transfers = [
            group.send_message(header.buffers, to=1, tag=Tag.PAGES, operation=name),
            group.isend(content_B, to=1, tag=Tag.PAGES, operation=name),
        ]
        clock.num_bytes += header.size_bytes + chunk.size_bytes
        unconfirmed.append((index, transfers))
    while unconfirmed:
        confirm_oldest()
    return clock.traffic(num_pages)


def receive_pages(
    group: ProcessGroup,
    write: Write,
    *,
    page_bytes: Sequence[int],
    num_pages: int,
    number: str,
    timeout_s: float,
) -> PageTraffic:
    """Receives the pages at rank 1 of a group of two; `write` gets only bytes that were checked.

    Raises PeerLost when the transfer takes longer than `timeout_s`, WireError for any chunk but the
    expected one.
    """
    clock = _Clock(group, timeout_s=timeout_s)
    chunks = list(chunks_of(page_bytes, num_pages))
    for index, chunk in enumerate(chunks):
        name = _chunk_name(index)
        header = clock.receive(source=0, operation=name)
        content_B = torch.empty(chunk.size_bytes, dtype=torch.uint8, device=group.device)
        clock.finish([group.irecv(content_B, source=0, tag=Tag.PAGES, operation=name)])
        clock.num_bytes += header.nbytes + chunk.size_bytes
        _expect(_header_of(chunks, index, content_B, number=number), header, group)
        write(chunk, content_B)
        answer = _encode(_written(chunks, index, number=number), group)
        is_last = index == len(chunks) - 1
        clock.finish(
            [
                group.send_message(
                    answer.buffers, to=0, tag=Tag.PAGES, operation=name, confirmed=is_last
                )
            ]
        )
    return clock.traffic(num_pages)


class _Clock:
    """Owns the deadline of the transfers of one reservation's pages, and counts their bytes."""

    def __init__(self, group: ProcessGroup, *, timeout_s: float) -> None:
        self.num_bytes = 0
        self._group = group
        self._began_s = time.monotonic()
        self._timeout_s = timeout_s

    def finish(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            transfer.finish(timeout_s=self._left_s())

    def receive(self, *, source: int, operation: str) -> memoryview:
        return self._group.receive_message(
            source=source, tag=Tag.PAGES, operation=operation, timeout_s=self._left_s()
        )

    def traffic(self, num_pages: int) -> PageTraffic:
        return PageTraffic(
            num_pages=num_pages,
            num_bytes=self.num_bytes,
            seconds=time.monotonic() - self._began_s,
        )

    def _left_s(self) -> float:
        left_s = self._began_s + self._timeout_s - time.monotonic()
        if left_s <= 0:
            raise PeerLost(
                peer=self._group.members[1 - self._group.rank],
                operation="migrating pages",
                reason=f"not done within {self._timeout_s:g} s",
            )
        return left_s


def _header_of(chunks: Sequence[Chunk], index: int, content_B: Tensor, *, number: str) -> _Header:
    return _Header(
        migration=number,
        index=index,
        num_chunks=len(chunks),
        chunk=chunks[index],
        checksum=_checksum(content_B),
    )


def _written(chunks: Sequence[Chunk], index: int, *, number: str) -> _Header:
    return _Header(migration=number, index=index, num_chunks=len(chunks), chunk=None, checksum=0)


def _checksum(content_B: Tensor) -> int:
    """Returns the sum of all words times odd weights, computed where the bytes are. Integers wrap,
    so the order does not matter; a single changed word always changes the sum."""
    if padding := -len(content_B) % _WORD_BYTES:
        content_B = F.pad(content_B, (0, padding))
    words = content_B.view(torch.int64)
    weights = torch.arange(1, 2 * len(words), 2, device=content_B.device)
    return int(weights.mul_(words).sum()) % 2**64


def _encode(header: _Header, group: ProcessGroup) -> wire.Message:
    return wire.message_of(
        wire.Kind.PAGES, epoch=group.epoch, round_id=header.index, content=header
    )


def _expect(due: _Header, content: memoryview, group: ProcessGroup) -> None:
    prefix = wire.decode_prefix(content, epoch=group.epoch)
    header = wire.decode_payload(_headers, prefix, content, expected=wire.Kind.PAGES)
    for name in header.__struct_fields__:
        received, expected = getattr(header, name), getattr(due, name)
        if received != expected:
            raise WireError(f"found {name} {received} in a page header, expected {expected}")


def _chunk_name(index: int) -> str:
    return f"page chunk {index}"
