"""Leased pages keep their content; reserved pages are found with the right content or not found."""

import pickle
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.config import SchedulerConfig, TreeConfig
from eesd_dist.schedule.page_leases import (
    KvLayout,
    LeasedPages,
    PageLease,
    PageLeases,
    PageReservation,
)
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.schedule.plans import Committed, RoundPlan
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.types import (
    PageId,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from tests.unit.schedule.hash_stages import (
    VOCAB_SIZE,
    Ledger,
    ToyStages,
    kv_layout,
    make_pages,
    run_until_idle,
    toy_answer,
)

PAGE = 4


class Pipeline:
    """A scheduler, and toy stages that check every slot they read; at most one round in flight."""

    def __init__(self, *, num_pages: int, seed: int, tree: TreeConfig | None = None) -> None:
        self.scheduler = Scheduler(
            config=SchedulerConfig(
                max_running=4, max_waiting=32, token_budget=16, prefill_chunk=8, overlap=False
            ),
            pages=make_pages(num_pages, page_size=PAGE),
            max_model_len=40,
            max_draft_tokens=3,
            vocab_size=VOCAB_SIZE,
            clock=lambda: 0.0,
            tree=tree,
        )
        self.stages = ToyStages(page_size=PAGE, random=Random(seed))
        self.ledger = Ledger()
        self._in_flight: tuple[RoundPlan, Mapping[RequestId, Committed]] | None = None

    def step(self) -> None:
        """Plans a round, or commits the one in flight."""
        if self._in_flight is not None:
            plan, results = self._in_flight
            self._in_flight = None
            self.stages.settle(plan)
            self.ledger.write(self.scheduler.commit(plan, results))
        else:
            plan_or_none = self.scheduler.plan(0)
            if plan_or_none is not None:
                self._in_flight = (plan_or_none, self.stages.run(plan_or_none))
        self.scheduler.check()

    def lose_stores(self) -> None:
        self._in_flight = None
        self.stages.lose()
        self.scheduler.reset_computed()

    def moving(self) -> set[int]:
        slots = [slot for move in self.stages.pending for slot in move]
        return {page for page, _ in slots}

    def finish(self) -> None:
        while self._in_flight is not None:
            self.step()
        run_until_idle(self.scheduler, self.stages, self.ledger)

    def write_from(self, other: "Pipeline", reservation: PageReservation) -> None:
        """Copies the leased slots."""
        for other_page, own_page in reservation.moves:
            for offset in range(PAGE):
                for other_slots, own_slots in (
                    (other.stages.keys, self.stages.keys),
                    (other.stages.head_keys, self.stages.head_keys),
                ):
                    own_slots.pop((own_page, offset), None)
                    if (other_page, offset) in other_slots:
                        own_slots[(own_page, offset)] = other_slots[(other_page, offset)]


def _request(
    name: str, *, length: int, seed: int, drafts: bool = True, cache_salt: str = ""
) -> Request:
    prompt = tuple(TokenId(3 + i % 5) for i in range(length))
    return Request(
        request_id=RequestId(name),
        prompt=prompt,
        sampling=SamplingParams(seed=seed, max_tokens=12),
        speculation=SpeculationParams(mode="auto" if drafts else "off"),
        cache_salt=cache_salt,
    )


def _resumed(pipeline: Pipeline, request: Request) -> Request:
    generated = tuple(pipeline.ledger.answers.get(request.request_id, ()))
    return Request(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=request.sampling,
        speculation=request.speculation,
        cache_salt=request.cache_salt,
        generated=generated,
    )


def _migrate(source: Pipeline, target: Pipeline) -> PageReservation:
    lease = source.scheduler.lease(None, untouchable=source.moving())
    reservation = target.scheduler.reserve(lease.requests, untouchable=target.moving())
    target.write_from(source, reservation)
    assert source.scheduler.leases.end_lease(lease.number)
    assert target.scheduler.leases.adopt(reservation.number)
    source.scheduler.check()
    target.scheduler.check()
    return reservation


def test_a_request_goes_on_in_another_pipeline_from_its_full_pages() -> None:
    source, target = (Pipeline(num_pages=32, seed=seed) for seed in (1, 2))
    request = _request("a", length=19, seed=5)
    source.scheduler.add(request)
    while len(source.ledger.answers.get(request.request_id, ())) < 4:
        source.step()
    reservation = _migrate(source, target)
    moved = _resumed(source, request)
    source.scheduler.abort(request.request_id)
    target.scheduler.add(moved)
    plan = target.scheduler.plan(0)
    assert plan is not None
    assert plan.items[0].start == len(reservation.moves) * PAGE
    num_tokens = len(moved.prompt) + len(moved.generated)
    assert plan.items[0].num_known == num_tokens - plan.items[0].start <= PAGE + 1
    target.ledger.write(target.scheduler.commit(plan, target.stages.run(plan)))
    target.finish()
    whole, _ = toy_answer(request, max_model_len=40)
    assert list(moved.generated) + target.ledger.answers[request.request_id] == whole


def test_migrated_pages_are_found_by_their_own_request_and_by_no_other_salt() -> None:
    source, target = (Pipeline(num_pages=64, seed=seed) for seed in (1, 2))
    for salt in ("one", "two"):
        source.scheduler.add(_request(salt, length=19, seed=5, cache_salt=salt))
    while min(map(len, source.ledger.answers.values()), default=0) < 2:
        source.step()
    while any(live.in_flight for live in source.scheduler._running):
        source.step()
    reservation = _migrate(source, target)
    assert len(reservation.moves) == len({page for _, page in reservation.moves}) >= 8
    for salt in ("one", "two"):
        moved = _resumed(source, _request(salt, length=19, seed=5, cache_salt=salt))
        source.scheduler.abort(moved.request_id)
        target.scheduler.add(moved)
    target.scheduler.add(_request("three", length=19, seed=5, cache_salt="three"))
    starts: dict[str, int] = {}
    while len(starts) < 3:
        plan = target.scheduler.plan(0)
        assert plan is not None
        for item in plan.items:
            starts.setdefault(item.live.request_id, item.start)
        target.ledger.write(target.scheduler.commit(plan, target.stages.run(plan)))
    assert starts["one"] >= 16
    assert starts["two"] >= 16
    assert starts["three"] == 0
    target.finish()


def test_a_prefix_that_is_cached_already_is_not_copied_and_a_shared_one_is_copied_once() -> None:
    source, target = (Pipeline(num_pages=64, seed=seed) for seed in (1, 2))
    for name in ("first", "second"):
        source.scheduler.add(_request(name, length=24, seed=3))
        for _ in range(8):
            source.step()
    reservation = _migrate(source, target)
    leased = {page for live in source.scheduler._running for page in live.pages}
    assert 0 < len(reservation.moves) <= len(leased)
    assert len({page for page, _ in reservation.moves}) == len(reservation.moves)
    second = _migrate(source, target)
    assert second.moves == ()
    assert second.num_cached > 0


def test_lost_stores_void_leases_and_reservations() -> None:
    source, target = (Pipeline(num_pages=32, seed=seed) for seed in (1, 2))
    source.scheduler.add(_request("a", length=17, seed=5))
    for _ in range(8):
        source.step()
    lease = source.scheduler.lease(None, untouchable=set())
    reservation = target.scheduler.reserve(lease.requests, untouchable=set())
    assert reservation.moves
    source.lose_stores()
    target.lose_stores()
    assert not source.scheduler.leases.end_lease(lease.number)
    assert not target.scheduler.leases.adopt(reservation.number)
    source.scheduler.check()
    target.scheduler.check()
    assert target.scheduler.usage().num_cached_pages == 0


def test_an_abandoned_reservation_leaves_every_page_free() -> None:
    source, target = (Pipeline(num_pages=32, seed=seed) for seed in (1, 2))
    source.scheduler.add(_request("a", length=17, seed=5))
    for _ in range(8):
        source.step()
    lease = source.scheduler.lease(None, untouchable=set())
    reservation = target.scheduler.reserve(lease.requests, untouchable=set())
    assert target.scheduler.usage().num_free_pages == 32 - len(reservation.moves)
    target.scheduler.leases.abandon(reservation.number)
    target.scheduler.check()
    usage = target.scheduler.usage()
    assert (usage.num_free_pages, usage.num_cached_pages) == (32, 0)


def test_where_room_is_short_less_is_copied_and_running_requests_keep_a_page_each() -> None:
    pages = PageAllocator(num_pages=6, page_size=PAGE, prefix_caching=True)
    leases = PageLeases(pages)
    leased = LeasedPages(
        request_id=RequestId("a"),
        tokens=tuple(TokenId(i) for i in range(8 * PAGE)),
        pages=tuple(PageId(page) for page in range(8)),
        drafts=True,
    )
    reservation = leases.reserve(
        [leased], salt_of=lambda _: "exit 0", num_reserved=2, untouchable={PageId(3)}
    )
    assert [page for page, _ in reservation.moves] == [0, 1, 2]
    assert reservation.num_rejected == 5
    assert pages.num_free == 3
    assert leases.adopt(reservation.number)
    pages.check()
    prefix = pages.match_prefix([*leased.tokens, TokenId(0)], salt="exit 0")
    assert prefix == [page for _, page in reservation.moves]


def test_a_reservation_leaves_a_busy_target_what_its_own_requests_grow_to() -> None:
    target = Pipeline(num_pages=32, seed=2)
    for i in range(5):  # one more than max_running
        target.scheduler.add(_request(f"r{i}", length=9, seed=i))
    for _ in range(4):
        target.step()
    assert (target.scheduler.num_running, target.scheduler.usage().num_waiting) == (4, 1)
    leased = LeasedPages(
        request_id=RequestId("a"),
        tokens=tuple(TokenId(20 + i % 7) for i in range(60 * PAGE)),
        pages=tuple(PageId(page) for page in range(60)),
        drafts=True,
    )
    reservation = target.scheduler.reserve([leased], untouchable=target.moving())
    assert reservation.moves
    assert reservation.num_rejected
    target.finish()
    assert target.scheduler.usage().num_preemptions == 0
    target.scheduler.leases.abandon(reservation.number)
    target.scheduler.check()


def test_the_first_difference_between_two_layouts_is_said_in_words() -> None:
    local = kv_layout(finds_prefixes=False)
    fields = {name: getattr(local, name) for name in local.__slots__}
    same = KvLayout(**{**fields, "finds_prefixes": True})
    assert local.why_not(same) is None
    assert same.why_not(local) == "cache.prefix_caching is off there"
    other = KvLayout(**{**fields, "finds_prefixes": True, "verify_ranks": 4})
    assert local.why_not(other) == "verify_ranks is 2 here and 4 there"


def _leased(name: str, *, num_pages: int, topic: int = 0) -> LeasedPages:
    return LeasedPages(
        request_id=RequestId(name),
        tokens=tuple(TokenId(1000 * topic + i) for i in range(num_pages * PAGE)),
        pages=tuple(PageId(page) for page in range(num_pages)),
        drafts=True,
    )


def test_a_limited_reservation_takes_the_first_pages_and_the_next_one_those_after_them() -> None:
    pages = PageAllocator(num_pages=16, page_size=PAGE, prefix_caching=True)
    leases = PageLeases(pages)
    leased = _leased("a", num_pages=7)
    moved: list[int] = []
    for num_left in (4, 1, 0):
        assert leases.num_missing([leased], salt_of=lambda _: "s") == {"a": 7 - len(moved)}
        reservation = leases.reserve(
            [leased], salt_of=lambda _: "s", num_reserved=0, untouchable=set(), limit=3
        )
        assert (reservation.num_cached, reservation.num_left) == (len(moved), num_left)
        assert reservation.num_rejected == 0
        moved += [page for page, _ in reservation.moves]
        assert leases.adopt(reservation.number)
    assert moved == list(range(7))
    assert leases.num_missing([leased], salt_of=lambda _: "s") == {"a": 0}
    assert list(leases.owned()) == []
    pages.check()


@pytest.mark.parametrize("local", [(gpu, nccl) for gpu in ("", "A", "B") for nccl in (True, False)])
@pytest.mark.parametrize("remote", [("", True), ("A", True), ("A", False), ("B", True)])
def test_nccl_moves_pages_only_between_two_gpus_with_nccl_at_both_ends(
    local: tuple[str, bool], remote: tuple[str, bool]
) -> None:
    ends = [replace(kv_layout(), gpu=gpu, has_nccl=has_nccl) for gpu, has_nccl in (local, remote)]
    assert ends[0].why_not(ends[1]) is None, "neither needs to be equal"
    expected = {(("A", True), ("B", True)), (("B", True), ("A", True))}
    assert ends[0].backend_to(ends[1]) == ("nccl" if (local, remote) in expected else "link")


def test_planning_the_order_of_64_streams_of_4096_tokens_takes_less_than_16_mebibytes() -> None:
    """The one moment at which the tokens of all streams are in one process's memory; after that a
    KV migration has those of one stream."""
    requests = tuple(
        replace(_leased(f"r{i}", num_pages=4096 // PAGE, topic=i), tokens=tuple(range(4096)))
        for i in range(64)
    )
    pickled = pickle.dumps(PageLease(number="n", requests=requests))
    assert len(pickled) < 2 * 2**20
    tracemalloc.start()
    try:
        lease: PageLease = pickle.loads(pickled)
        leases = PageLeases(PageAllocator(num_pages=16, page_size=PAGE, prefix_caching=True))
        missing = leases.num_missing(lease.requests, salt_of=lambda _: "s")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(missing.values()) == {4096 // PAGE}
    assert peak < 16 * 2**20


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_interleaving_of_rounds_and_migrations_reads_a_wrong_page(data: st.DataObject) -> None:
    """The toy stages check each slot they read, in both pipelines; every text is complete."""
    tree = TreeConfig(shape="static", max_nodes=4) if data.draw(st.booleans()) else None
    source = Pipeline(num_pages=data.draw(st.integers(12, 40)), seed=1, tree=tree)
    target = Pipeline(num_pages=data.draw(st.integers(12, 40)), seed=2, tree=tree)
    requests = [
        _request(
            f"r{i}",
            length=data.draw(st.integers(1, 26)),
            seed=i % 2,
            drafts=data.draw(st.booleans()),
        )
        for i in range(data.draw(st.integers(1, 4)))
    ]
    for request in requests:
        source.scheduler.add(request)
    for i in range(data.draw(st.integers(0, 2))):
        target.scheduler.add(_request(f"theirs{i}", length=data.draw(st.integers(1, 26)), seed=i))

    def some_steps(*, limit: int = 8) -> None:
        for _ in range(data.draw(st.integers(0, limit))):
            data.draw(st.sampled_from((source, target))).step()

    some_steps(limit=40)
    lease = source.scheduler.lease(None, untouchable=source.moving())
    some_steps()
    reservation = target.scheduler.reserve(lease.requests, untouchable=target.moving())
    some_steps()
    for victim in (source, target):
        if data.draw(st.integers(0, 5)) == 0:
            victim.lose_stores()
            some_steps()
    target_lives = reservation.number in target.scheduler.leases._reservations
    if target_lives:  # else its ranks have closed the reservation and write nothing
        target.write_from(source, reservation)
    some_steps()
    if source.scheduler.leases.end_lease(lease.number):
        assert target.scheduler.leases.adopt(reservation.number) == target_lives
    else:
        target.scheduler.leases.abandon(reservation.number)
    some_steps()
    for request in requests:
        if request.request_id not in source.ledger.reasons:
            target.scheduler.add(_resumed(source, request))
            source.scheduler.abort(request.request_id)
            some_steps(limit=3)
    target.finish()
    for request in requests:
        name = request.request_id
        answers = [pipe.ledger.answers.get(name, []) for pipe in (source, target)]
        assert answers[0] + answers[1] == toy_answer(request, max_model_len=40)[0]
    target.scheduler.check()


def test_a_page_that_waits_for_an_accepted_branch_is_neither_leased_nor_reserved() -> None:
    """At every time with pending moves, in either pipeline."""
    tree = TreeConfig(shape="static", max_nodes=4)
    num_moments = 0
    for seed in range(40):
        for num_steps in range(4, 24, 2):  # verdicts have arrived, moves are pending
            source, target = (Pipeline(num_pages=14, seed=seed + i, tree=tree) for i in range(2))
            request = _request("a", length=10 + seed % 9, seed=5)
            source.scheduler.add(request)
            target.scheduler.add(_request("theirs", length=9 + seed % 9, seed=6))
            for _ in range(num_steps):
                source.step()
                target.step()
            if not source.moving() or request.request_id in source.ledger.reasons:
                continue
            num_moments += 1
            _migrate(source, target)
            target.scheduler.add(_resumed(source, request))
            target.scheduler.add(_request("their copy", length=9 + seed % 9, seed=6))
            target.finish()
    assert num_moments > 30
