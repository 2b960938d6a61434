"""KV pages between two processes: either every bit arrives, or an error is raised and none is
written."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eesd_dist.errors import PeerLost, WireError
from eesd_dist.schedule.page_leases import PageTraffic
from eesd_dist.transport import page_wire
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.transport.page_wire import MAX_CHUNK_BYTES, chunks_of, receive_pages
from eesd_dist.transport.wire import PREFIX_BYTES
from tests.dist.transport import page_peers
from tests.dist.transport.page_peers import NUM_PAGES, NUMBER, PAGE_BYTES, contents, join_link
from tests.dist.transport.peers import peer_process

pytestmark = pytest.mark.dist


class _Sender:
    """A sending process, and its store."""

    def __init__(self, job: Any, *args: object, **options: object) -> None:
        self.joined_s = 0.0
        self._store = StoreHost()
        self._job = peer_process(_run, job, self._store.at, args, options)

    def receive(self, layers: list[Tensor], *, timeout_s: float = 20.0) -> PageTraffic:
        with self._job:
            link = join_link(self._store.at, 1, timeout_s=timeout_s)
            self.joined_s = time.monotonic()
            return receive_pages(
                link,
                lambda chunk, content_B: page_peers.write(layers, chunk, content_B),
                page_bytes=PAGE_BYTES,
                num_pages=NUM_PAGES,
                number=NUMBER,
                timeout_s=timeout_s,
            )


def _run(job: Any, at: Address, args: tuple[object, ...], options: Mapping[str, object]) -> None:
    job(at, *args, **options)


def _empty() -> list[Tensor]:
    return [torch.zeros(NUM_PAGES, size, dtype=torch.uint8) for size in PAGE_BYTES]


def test_every_bit_arrives_and_is_counted() -> None:
    layers = _empty()
    traffic = _Sender(page_peers.send).receive(layers)
    assert all(torch.equal(x, y) for x, y in zip(layers, contents(), strict=True))
    num_chunks = len(list(chunks_of(PAGE_BYTES, NUM_PAGES)))
    assert num_chunks > 1
    header_bytes = traffic.num_bytes - NUM_PAGES * sum(PAGE_BYTES)
    assert num_chunks * PREFIX_BYTES < header_bytes < num_chunks * 256
    assert 0 < traffic.seconds < 20


def test_a_sender_killed_on_the_way_is_named_at_once() -> None:
    layers, sender = _empty(), _Sender(page_peers.send, dies_at=1)
    with pytest.raises(
        PeerLost, match=r"verify rank 1 of left on .* during page chunk.*connection is gone"
    ):
        sender.receive(layers)
    assert time.monotonic() - sender.joined_s < 15
    assert not any(x[-1].any() for x in layers), "the last pages never came"


def test_a_sender_that_stops_on_the_way_is_named_when_the_time_is_up() -> None:
    sender = _Sender(page_peers.send, stops_at=1)
    with pytest.raises(PeerLost, match=r"verify rank 1 of left .* page chunk.* no answer"):
        sender.receive(_empty(), timeout_s=1.5)
    assert time.monotonic() - sender.joined_s < 10


@pytest.mark.parametrize(
    ("spoilt_byte", "message"),
    [
        (0, "found magic"),
        (33, "prefix checksum: found"),
        (PREFIX_BYTES + 3, "payload checksum: found"),
        (-6, r"found checksum \d+ in a page header, expected"),
    ],
)
def test_a_damaged_chunk_is_refused_before_anything_is_written(
    spoilt_byte: int, message: str
) -> None:
    layers = _empty()
    with pytest.raises(WireError, match=message):
        _Sender(page_peers.send_damaged, spoilt_byte).receive(layers)
    assert not any(x.any() for x in layers)


def test_pages_of_another_migration_are_refused() -> None:
    store = StoreHost()
    with (
        peer_process(page_peers.send, store.at),
        pytest.raises(WireError, match="found migration 3f1c in a page header, expected another"),
    ):
        receive_pages(
            join_link(store.at, 1, timeout_s=20.0),
            lambda chunk, content_B: pytest.fail("nothing is to be written"),
            page_bytes=PAGE_BYTES,
            num_pages=NUM_PAGES,
            number="another",
            timeout_s=20.0,
        )


@given(
    page_bytes=st.lists(st.integers(1, 50), max_size=6),
    num_pages=st.integers(0, 20),
    max_bytes=st.integers(1, 200),
)
def test_chunks_cover_every_page_of_every_layer_once(
    page_bytes: list[int], num_pages: int, max_bytes: int
) -> None:
    seen: list[tuple[int, int]] = []
    for chunk in chunks_of(page_bytes, num_pages, max_bytes=max_bytes):
        cells = [
            (layer, page)
            for page in range(chunk.first_page, chunk.last_page)
            for layer in range(chunk.first_layer, chunk.last_layer)
        ]
        assert chunk.size_bytes == sum(page_bytes[layer] for layer, _ in cells) > 0
        assert chunk.size_bytes <= max_bytes or len(cells) == 1
        seen += cells
    assert sorted(seen) == [
        (layer, p) for layer in range(len(page_bytes)) for p in range(num_pages)
    ]


def test_no_chunk_is_larger_than_eight_mebibytes() -> None:
    assert MAX_CHUNK_BYTES == 8 * 2**20
    assert max(chunk.size_bytes for chunk in chunks_of((131_072,) * 80, 40)) <= MAX_CHUNK_BYTES


@given(
    content=st.binary(min_size=1, max_size=80), at=st.integers(0, 79), change=st.integers(1, 255)
)
def test_a_checksum_sees_each_changed_byte(content: bytes, at: int, change: int) -> None:
    content_B = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    changed = content_B.clone()
    changed[at % len(content)] ^= change
    assert page_wire._checksum(content_B) == page_wire._checksum(content_B.clone())
    assert page_wire._checksum(content_B) != page_wire._checksum(changed)
