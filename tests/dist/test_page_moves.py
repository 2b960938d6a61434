"""Two ranks migrate pages over one link; a rank in a new epoch, or without a part, writes none."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.schedule.page_leases import LeasedPages, PageLease, PageReservation, PageTraffic
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.transport.page_wire import MAX_CHUNK_BYTES, Chunk
from eesd_dist.types import PageId, RequestId
from eesd_dist.workers import page_moves
from eesd_dist.workers.messages import Meeting, PageLink, PagePart
from eesd_dist.workers.page_moves import PageMoves, PageSharing

pytestmark = pytest.mark.dist

NUM_PAGES = 3
PAGE_BYTES = MAX_CHUNK_BYTES  # one chunk each
EPOCH = 5


class Store:
    """One layer of a few large pages."""

    device = torch.device("cpu")

    def __init__(
        self,
        fill: int,
        *,
        before_read: Callable[[int], None] = lambda _: None,
        before_write: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.page_bytes = (PAGE_BYTES,)
        self.pages_PB = torch.full((16, PAGE_BYTES), fill, dtype=torch.uint8)
        self._before_read = before_read
        self._before_write = before_write
        self._num_read = 0
        self._num_written = 0

    def read(self, chunk: Chunk, pages: Sequence[int]) -> Tensor:
        self._before_read(self._num_read)
        self._num_read += 1
        return self.pages_PB[list(pages[chunk.first_page : chunk.last_page])].view(-1)

    def write(self, chunk: Chunk, pages: Sequence[int], content_B: Tensor) -> None:
        self.pages_PB[list(pages[chunk.first_page : chunk.last_page])] = content_B
        self._num_written += 1
        self._before_write(self._num_written)

    def settle(self) -> None:
        return


class Engine:
    """Leases and reserves pages, and does nothing else."""

    epoch = EPOCH

    def __init__(self) -> None:
        self.held: set[str] = set()

    def lease(self, request_ids: object) -> PageLease:
        del request_ids
        self.held.add("l1")
        return PageLease(number="l1", requests=())

    def end_lease(self, number: str) -> bool:
        self.held.discard(number)
        return True

    def reserve(self, leased: Sequence[LeasedPages], *, limit: int) -> PageReservation:
        del leased
        self.held.add("n1")
        return PageReservation(
            number="n1",
            epoch=EPOCH,
            moves=tuple((PageId(i), PageId(7 - i)) for i in range(limit)),
            num_cached=0,
            num_rejected=0,
        )

    def abandon(self, number: str) -> None:
        self.held.discard(number)

    adopt = end_lease


def _none() -> object:
    raise EngineError("there is none")


def _sharing(
    engine: Callable[[], object] = Engine, *, clock: Callable[[], float] = time.monotonic
) -> PageSharing:
    return PageSharing(
        address="127.0.0.1",
        kv_sharing=engine,  # type: ignore[arg-type]
        refusals=RefusedConnections(),
        clock=clock,
    )


def _moves(store: Store) -> PageMoves:
    moves = PageMoves(
        address="127.0.0.1",
        store=lambda: store,  # type: ignore[arg-type, return-value]
        layout=_none,  # type: ignore[arg-type]
        refusals=RefusedConnections(),
    )
    moves.enter(EPOCH)
    return moves


def _links(meeting: Meeting, *, timeout_s: float = 20.0) -> tuple[PageLink, PageLink]:
    source, target = (
        PageLink(
            meeting=meeting,
            rank_name="verify rank 0",
            ends=("verify rank 0 of left", "verify rank 0 of right"),
            end=end,
            backend="link",
            timeout_s=timeout_s,
        )
        for end in (0, 1)
    )
    return source, target


def _parts(
    meeting: Meeting, number: str, *moves: tuple[int, int], timeout_s: float = 20.0
) -> tuple[PagePart, PagePart]:
    source, target = (
        PagePart(
            link=meeting.number,
            number=number,
            epoch=EPOCH,
            pages=tuple(move[end] for move in moves),
            timeout_s=timeout_s,
        )
        for end in (0, 1)
    )
    return source, target


class Pair:
    """Two connected ranks."""

    def __init__(self, left: Store, right: Store, *, timeout_s: float = 20.0) -> None:
        self.left, self.right = _moves(left), _moves(right)
        self._sharing = _sharing()
        self.meeting = self._sharing.meet(lasts_s=60.0)
        self._timeout_s = timeout_s
        links = _links(self.meeting, timeout_s=timeout_s)
        opened = _both(lambda: self.left.open(links[0]), lambda: self.right.open(links[1]))
        assert opened == [None, None]

    def move(self, number: str, *moves: tuple[int, int]) -> list[object]:
        """Returns what each end returned or raised."""
        source, target = _parts(self.meeting, number, *moves, timeout_s=self._timeout_s)
        return _both(lambda: self.left.send(source), lambda: self.right.receive(target))

    def close(self) -> None:
        for end in (self.left, self.right):
            end.close(self.meeting.number)


@contextmanager
def _pair(left: Store, right: Store, *, timeout_s: float = 20.0) -> Iterator[Pair]:
    pair = Pair(left, right, timeout_s=timeout_s)
    try:
        yield pair
    finally:
        pair.close()


def _both(*work: Callable[[], object]) -> list[object]:
    results: list[object] = [None] * len(work)

    def run(at: int) -> None:
        try:
            results[at] = work[at]()
        except Exception as error:  # checked by the test
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


MOVES = tuple((i, 7 - i) for i in range(NUM_PAGES))


def test_pages_go_from_their_places_to_those_that_were_reserved() -> None:
    theirs = Store(0)
    for page in range(NUM_PAGES):
        theirs.pages_PB[page] = page + 1
    target_store = Store(0)
    with _pair(theirs, target_store) as pair:
        source_result, received = pair.move("n1", *MOVES)
        assert isinstance(source_result, PageTraffic)
        assert isinstance(received, PageTraffic)
        assert source_result.num_bytes == received.num_bytes > NUM_PAGES * PAGE_BYTES
        assert pair.left.num_moved == pair.right.num_moved == NUM_PAGES
    assert target_store.pages_PB[:8, 0].tolist() == [0, 0, 0, 0, 0, 3, 2, 1]
    assert torch.equal(target_store.pages_PB[[7, 6, 5]], theirs.pages_PB[:NUM_PAGES])


@pytest.mark.parametrize("end", ["sender", "receiver"])
@pytest.mark.parametrize("num_before", range(4))
def test_a_link_that_is_cut_between_or_in_two_streams_keeps_what_was_there(
    num_before: int, end: str
) -> None:
    """Three streams of two pages each; after so many the next one is cut in its second page."""
    failing_at = 2 * num_before + 1

    def fail(count: int) -> None:
        if count == failing_at:
            raise OSError("cut")

    theirs = Store(0, before_read=fail if end == "sender" else lambda _: None)
    for page in range(6):
        theirs.pages_PB[page] = page + 1
    target_store = Store(
        0, before_write=(lambda n: fail(n - 1)) if end == "receiver" else lambda _: None
    )
    with _pair(theirs, target_store, timeout_s=10.0) as pair:
        for stream in range(3):
            moves = [(page, 8 + page) for page in (2 * stream, 2 * stream + 1)]
            source_result, received = pair.move(f"n{stream}", *moves)
            if stream < num_before:
                assert isinstance(source_result, PageTraffic)
                assert isinstance(received, PageTraffic)
            elif stream == num_before:
                own, other = (
                    (source_result, received) if end == "sender" else (received, source_result)
                )
                assert isinstance(own, OSError)
                assert isinstance(other, PeerLost)
            else:
                for closed in (source_result, received):
                    assert isinstance(closed, EngineError)
                    assert "the link for these pages is closed" in str(closed)
    for page in range(2 * num_before if num_before < 3 else 6):
        assert torch.equal(target_store.pages_PB[8 + page], theirs.pages_PB[page])
    assert not target_store.pages_PB[8 + failing_at + 1 :].any(), "nothing is written after the cut"


def test_a_rank_that_goes_on_to_another_epoch_writes_no_page_after_that() -> None:
    def leave(num_written: int) -> None:
        if num_written == 1:
            threading.Thread(target=pair.right.enter, args=(6,)).start()
            # The new epoch must wait for this write, and no other write may happen before it.
            pause.wait(0.3)

    pause = threading.Event()
    target_store = Store(0, before_write=leave)
    with _pair(Store(9), target_store) as pair:
        source_result, received = pair.move("n1", *MOVES)
        assert isinstance(received, PeerLost)
        assert "it belongs to epoch 6 now" in str(received)
        assert isinstance(source_result, PeerLost)
    assert (target_store.pages_PB[:, 0] == 9).sum() < NUM_PAGES


def test_a_peer_that_sends_nothing_costs_one_deadline_and_the_link() -> None:
    asleep = threading.Event()
    theirs = Store(9, before_read=lambda count: asleep.wait(20.0) if count == 1 else None)
    target_store = Store(0)
    with _pair(theirs, target_store, timeout_s=1.0) as pair:
        source, target = _parts(pair.meeting, "n1", *MOVES, timeout_s=1.0)
        sending = threading.Thread(target=lambda: _both(lambda: pair.left.send(source)))
        sending.start()
        began_s = time.monotonic()
        with pytest.raises(PeerLost, match="verify rank 0 of left"):
            pair.right.receive(target)
        assert 0.9 < time.monotonic() - began_s < 10
        asleep.set()
        sending.join(20.0)
    assert (target_store.pages_PB[:, 0] == 9).sum() < NUM_PAGES


def test_a_sender_reads_one_chunk_more_than_the_two_that_are_not_confirmed() -> None:
    may_go_on = threading.Event()
    theirs = Store(9)
    target_store = Store(0, before_write=lambda _: may_go_on.wait(20.0))
    with _pair(theirs, target_store) as pair:
        source, target = _parts(pair.meeting, "n1", *((i, i) for i in range(8)))
        moving = threading.Thread(
            target=_both, args=(lambda: pair.left.send(source), lambda: pair.right.receive(target))
        )
        moving.start()
        time.sleep(1.0)
        assert theirs._num_read == 3
        may_go_on.set()
        moving.join(20.0)
    assert torch.equal(target_store.pages_PB[:8], theirs.pages_PB[:8])


def test_a_link_without_parts_closes_itself_so_that_a_late_part_writes_nothing() -> None:
    target_store = Store(0)
    with _pair(Store(9), target_store, timeout_s=0.5) as pair:
        assert all(isinstance(traffic, PageTraffic) for traffic in pair.move("n1", MOVES[0]))
        time.sleep(1.5)
        for refusal in pair.move("n2", *MOVES[1:]):
            assert isinstance(refusal, EngineError)
            assert "the link for these pages is closed" in str(refusal)
    assert (target_store.pages_PB[:, 0] == 9).sum() == 1


def test_a_meeting_that_has_expired_cannot_be_joined() -> None:
    time_s = 0.0
    sharing = _sharing(clock=lambda: time_s)
    meeting = sharing.meet(lasts_s=5.0)
    time_s = 6.0
    sharing.expire()
    source, _ = _links(meeting, timeout_s=1.0)
    with pytest.raises(PeerLost, match="rendezvous store"):
        _moves(Store(9)).open(source)


def test_leases_and_reservations_end_when_nothing_more_is_heard_of_them() -> None:
    time_s = 0.0
    engine = Engine()
    sharing = _sharing(lambda: engine, clock=lambda: time_s)
    lease = sharing.lease([RequestId("a")], lasts_s=7.0)
    sharing.reserve(lease, limit=1, lasts_s=5.0)
    assert engine.held == {"l1", "n1"}
    time_s = 6.0
    sharing.expire()
    assert engine.held == {"l1"}
    time_s = 8.0
    sharing.expire()
    assert engine.held == set()


def test_a_meeting_that_finds_no_place_is_an_error_and_takes_no_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_: object) -> None:
        raise OSError("no port is left")

    monkeypatch.setattr(page_moves, "StoreHost", refuse)
    engine = Engine()
    with pytest.raises(OSError, match="no port"):
        _sharing(lambda: engine).meet(lasts_s=5.0)
    assert engine.held == set()
