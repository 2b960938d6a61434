"""Transfer of KV pages between two ranks, in chunks that are checked before they are written.

Both ends know in advance which pages of how many layers are transferred, and cut them into the same
chunks. A chunk's header, a message in the format of `wire`, identifies it. Anything but the
expected chunk is a WireError before a byte is written: version, KV migration, layers, pages and
size are compared, then the checksum of the bytes. The receiver confirms each chunk once it is
written, so that both ends know of progress and hold few chunks at a time. No chunk is larger than
`MAX_CHUNK_BYTES`, unless a single page of a single layer is.

Bytes travel on the group's device: over NCCL from one GPU to another, else over Gloo. Headers and
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
HEADER_BYTES = 256
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
        answer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        name = _chunk_name(index)
        transfers.append(group.irecv(answer, source=1, tag=Tag.PAGES, operation=name))
        clock.finish(transfers)
        _expect(_written(chunks, index, number=number), answer, group)

    for index, chunk in enumerate(chunks):
        content_B = read(chunk).to(group.device)  # while the chunks before it are being sent
        if len(unconfirmed) == _WINDOW:
            confirm_oldest()
        header = _encode(_header_of(chunks, index, content_B, number=number), group)
        name = _chunk_name(index)
        transfers = [
            group.isend(x, to=1, tag=Tag.PAGES, operation=name) for x in (header, content_B)
        ]
        unconfirmed.append((index, transfers))
    while unconfirmed:
        confirm_oldest()
    return clock.traffic(num_pages, chunks)


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
    # The next chunk comes while this one is checked and written, unless the write would be queued
    # behind that receive, and happen late.
    num_prefetched = 0 if group.queues_transfers else 1
    pending: deque[tuple[Tensor, Tensor, tuple[Transfer, Transfer]]] = deque()
    for index, chunk in enumerate(chunks):
        for next_index in range(index + len(pending), min(index + num_prefetched + 1, len(chunks))):
            pending.append(_ask_for(group, next_index, chunks[next_index]))
        header, content_B, transfers = pending.popleft()
        clock.finish(transfers)
        _expect(_header_of(chunks, index, content_B, number=number), header, group)
        write(chunk, content_B)
        answer = _encode(_written(chunks, index, number=number), group)
        is_last = index == len(chunks) - 1
        name = _chunk_name(index)
        clock.finish([group.isend(answer, to=0, tag=Tag.PAGES, operation=name, confirmed=is_last)])
    return clock.traffic(num_pages, chunks)


def _ask_for(
    group: ProcessGroup, index: int, chunk: Chunk
) -> tuple[Tensor, Tensor, tuple[Transfer, Transfer]]:
    """Returns buffers for a chunk's header and bytes, and the transfers that fill them."""
    header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    content_B = torch.empty(chunk.size_bytes, dtype=torch.uint8, device=group.device)
    name = _chunk_name(index)
    return (
        header,
        content_B,
        (
            group.irecv(header, source=0, tag=Tag.PAGES, operation=name),
            group.irecv(content_B, source=0, tag=Tag.PAGES, operation=name),
        ),
    )


class _Clock:
    """Owns the deadline of the transfers of one reservation's pages."""

    def __init__(self, group: ProcessGroup, *, timeout_s: float) -> None:
        self._peer = group.members[1 - group.rank]
        self._began_s = time.monotonic()
        self._timeout_s = timeout_s

    def finish(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            left_s = self._began_s + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise PeerLost(
                    peer=self._peer,
                    operation="migrating pages",
                    reason=f"not done within {self._timeout_s:g} s",
                )
            transfer.finish(timeout_s=left_s)

    def traffic(self, num_pages: int, chunks: Sequence[Chunk]) -> PageTraffic:
        return PageTraffic(
            num_pages=num_pages,
            num_bytes=sum(chunk.size_bytes + HEADER_BYTES for chunk in chunks),
            seconds=time.monotonic() - self._began_s,
        )


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


def _encode(header: _Header, group: ProcessGroup) -> Tensor:
    message = wire.message_of(
        wire.Kind.PAGES,
        epoch=group.epoch,
        round_id=header.index,
        content=header,
        frame_bytes=HEADER_BYTES,
    )
    assert message.overflow is None, f"{header} does not fit {HEADER_BYTES} bytes"
    return message.frame


def _expect(due: _Header, frame: Tensor, group: ProcessGroup) -> None:
    prefix = wire.decode_prefix(frame, epoch=group.epoch)
    header = wire.decode_payload(_headers, prefix, frame, None, expected=wire.Kind.PAGES)
    for name in header.__struct_fields__:
        received, expected = getattr(header, name), getattr(due, name)
        if received != expected:
            raise WireError(f"found {name} {received} in a page header, expected {expected}")


def _chunk_name(index: int) -> str:
    return f"page chunk {index}"
