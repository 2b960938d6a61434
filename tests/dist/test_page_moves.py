"""Two ranks migrate pages; a rank in a new epoch writes none."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.schedule.page_leases import PageLease, PageReservation, PageTraffic
from eesd_dist.transport.page_wire import MAX_CHUNK_BYTES, Chunk
from eesd_dist.transport.refused import RefusedConnections
from eesd_dist.types import PageId
from eesd_dist.workers import page_moves
from eesd_dist.workers.messages import PageLink, Reservation
from eesd_dist.workers.page_moves import PageMoves, PageSharing

pytestmark = pytest.mark.dist

NUM_PAGES = 3
PAGE_BYTES = MAX_CHUNK_BYTES  # one chunk each


class Store:
    """One layer of a few large pages."""

    def __init__(self, fill: int, *, before_write: Callable[[int], None] = lambda _: None) -> None:
        self.page_bytes = (PAGE_BYTES,)
        self.pages_PB = torch.full((8, PAGE_BYTES), fill, dtype=torch.uint8)
        self._before_write = before_write
        self._num_written = 0

    def read(self, chunk: Chunk, pages: Sequence[int]) -> Tensor:
        return self.pages_PB[list(pages[chunk.first_page : chunk.last_page])].view(-1)

    def write(self, chunk: Chunk, pages: Sequence[int], content_B: Tensor) -> None:
        self.pages_PB[list(pages[chunk.first_page : chunk.last_page])] = content_B
        self._num_written += 1
        self._before_write(self._num_written)

    def settle(self) -> None:
        return


class Engine:
    """Reserves pages, and does nothing else."""

    def reserve(self, leased: object) -> PageReservation:
        del leased
        return PageReservation(
            number="n1",
            epoch=5,
            moves=tuple((PageId(i), PageId(7 - i)) for i in range(NUM_PAGES)),
            num_found=0,
            num_refused=0,
        )


def _none() -> object:
    raise EngineError("there is none")


def _sharing(engine: Callable[[], object] = Engine) -> PageSharing:
    return PageSharing(
        address="127.0.0.1",
        kv_sharing=engine,  # type: ignore[arg-type]
        refused=RefusedConnections(),
    )


def _moves(store: Store) -> PageMoves:
    moves = PageMoves(
        address="127.0.0.1",
        store=lambda: store,  # type: ignore[arg-type, return-value]
        layout=_none,  # type: ignore[arg-type]
        refused=RefusedConnections(),
    )
    moves.enter(5)
    return moves


def _links(reservation: Reservation, *, timeout_s: float = 20.0) -> tuple[PageLink, PageLink]:
    leased, here = zip(*reservation.pages.moves, strict=True)
    source, target = (
        PageLink(
            number=reservation.pages.number,
            epoch=reservation.pages.epoch,
            store=reservation.store,
            rank_name="verify rank 0",
            ends=("verify rank 0 of left", "verify rank 0 of right"),
            pages=pages,
            timeout_s=timeout_s,
        )
        for pages in (leased, here)
    )
    return source, target


def _exchange(left: PageMoves, right: PageMoves) -> list[PageTraffic | Exception]:
    sharing = _sharing()
    reservation = sharing.reserve(PageLease(number="l1", requests=()))
    source, target = _links(reservation)
    results: dict[int, PageTraffic | Exception] = {}

    def run(at: int, work: Callable[[], PageTraffic]) -> None:
        try:
            results[at] = work()
        except Exception as error:  # checked by the test
            results[at] = error

    threads = [
        threading.Thread(target=run, args=(0, lambda: left.send(source))),
        threading.Thread(target=run, args=(1, lambda: right.receive(target))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[0], results[1]]


def test_pages_go_from_their_places_to_those_that_were_reserved() -> None:
    theirs = Store(0)
    for page in range(NUM_PAGES):
        theirs.pages_PB[page] = page + 1
    mine = Store(0)
    sent, received = _exchange(_moves(theirs), _moves(mine))
    assert isinstance(sent, PageTraffic)
    assert isinstance(received, PageTraffic)
    assert sent.num_bytes == received.num_bytes > NUM_PAGES * PAGE_BYTES
    assert mine.pages_PB[:, 0].tolist() == [0, 0, 0, 0, 0, 3, 2, 1]
    assert torch.equal(mine.pages_PB[[7, 6, 5]], theirs.pages_PB[:NUM_PAGES])


def test_a_rank_that_goes_on_to_another_epoch_writes_no_page_after_that() -> None:
    def leave(num_written: int) -> None:
        if num_written == 1:
            threading.Thread(target=right.enter, args=(6,)).start()
            # The new epoch must wait for this write, and no other write may happen before it.
            late.wait(0.3)

    late = threading.Event()
    mine = Store(0, before_write=leave)
    right = _moves(mine)
    sent, received = _exchange(_moves(Store(9)), right)
    assert isinstance(received, PeerLost)
    assert "it belongs to epoch 6 now" in str(received)
    assert isinstance(sent, PeerLost)
    assert (mine.pages_PB[:, 0] == 9).sum() < NUM_PAGES


def test_a_closed_reservation_cannot_be_joined() -> None:
    sharing = _sharing()
    reservation = sharing.reserve(PageLease(number="l1", requests=()))
    sharing.close(reservation.pages.number)
    source, _ = _links(reservation, timeout_s=1.0)
    with pytest.raises(PeerLost, match="rendezvous store"):
        _moves(Store(9)).send(source)


def test_a_reservation_that_finds_no_place_to_meet_takes_no_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_: object) -> None:
        raise OSError("no port is left")

    monkeypatch.setattr(page_moves, "StoreHost", refuse)
    sharing = _sharing(lambda: pytest.fail("pages were reserved"))
    with pytest.raises(OSError, match="no port"):
        sharing.reserve(PageLease(number="l1", requests=()))
