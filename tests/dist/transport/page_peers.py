"""The sending processes of the page tests."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.page_wire import Chunk, send_pages
from eesd_dist.transport.rendezvous import build_group, connect_store
from eesd_dist.transport.transfers import Tag

PAGE_BYTES = (4096, 4096, 1024, 6000)
"""Four layers; the last is an exit head of another shape."""
NUM_PAGES = 900
NUMBER = "3f1c"
ENDS = ("verify rank 1 of left", "verify rank 1 of right")


def join_link(at: Address, rank: int, *, timeout_s: float) -> ProcessGroup:
    return build_group(
        connect_store(at, timeout_s=10),
        epoch=4,
        name="pages of verify rank 1",
        rank=rank,
        size=2,
        timeout_s=timeout_s,
        join_timeout_s=20.0,
        members=ENDS,
    )


def contents() -> list[Tensor]:
    """[NUM_PAGES, page bytes] of each layer, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (NUM_PAGES, size), dtype=torch.uint8, generator=generator)
        for size in PAGE_BYTES
    ]


def read(layers: list[Tensor], chunk: Chunk) -> Tensor:
    pages = slice(chunk.first_page, chunk.last_page)
    return torch.cat([x[pages].reshape(-1) for x in layers[chunk.first_layer : chunk.last_layer]])


def write(layers: list[Tensor], chunk: Chunk, content_B: Tensor) -> None:
    num_pages = chunk.last_page - chunk.first_page
    sizes = [PAGE_BYTES[at] * num_pages for at in range(chunk.first_layer, chunk.last_layer)]
    blocks = torch.split(content_B, sizes)
    for x, block in zip(layers[chunk.first_layer : chunk.last_layer], blocks, strict=True):
        x[chunk.first_page : chunk.last_page] = block.view(num_pages, -1)


def send(at: Address, *, dies_at: int | None = None, stops_at: int | None = None) -> None:
    """Sends all pages, or is killed, or stops, at a given chunk."""
    torch.set_num_threads(1)
    layers = contents()
    num_read = 0

    def read_or_die(chunk: Chunk) -> Tensor:
        nonlocal num_read
        if num_read == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if num_read == stops_at:
            time.sleep(60)
        num_read += 1
        return read(layers, chunk)

    send_pages(
        join_link(at, 0, timeout_s=20.0),
        read_or_die,
        page_bytes=PAGE_BYTES,
        num_pages=NUM_PAGES,
        number=NUMBER,
        timeout_s=20.0,
    )


def send_damaged(at: Address, spoilt_byte: int) -> None:
    """Sends a correct header and content, except for one byte, counted from the first of the
    header, or from the first of the content where that is negative: -1 is the first."""
    torch.set_num_threads(1)
    link = join_link(at, 0, timeout_s=20.0)
    layers = contents()
    messages: list[bytearray] = []

    class Recorder:
        """Records the first messages that would be sent, and stops there."""

        members = link.members
        device = link.device
        epoch = link.epoch
        rank = 0

        def send_message(self, buffers: Sequence[memoryview], **_: object) -> None:
            messages.append(bytearray(b"".join(buffers)))

        def isend(self, x: Tensor, **_: object) -> None:
            messages.append(bytearray(x.numpy()))
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        send_pages(
            Recorder(),  # type: ignore[arg-type]
            lambda chunk: read(layers, chunk),
            page_bytes=PAGE_BYTES,
            num_pages=NUM_PAGES,
            number=NUMBER,
            timeout_s=20.0,
        )
    header, content_B = messages
    if spoilt_byte >= 0:
        header[spoilt_byte] ^= 1
    else:
        content_B[-1 - spoilt_byte] ^= 1
    for message in messages:
        link.send_message(
            [memoryview(message)], to=1, tag=Tag.PAGES, operation="a damaged chunk"
        ).finish(timeout_s=20.0)
