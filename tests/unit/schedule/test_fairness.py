"""No caller keeps another one waiting, and no text depends on the other callers."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from random import Random

import pytest

from eesd_dist.config import SchedulerConfig
from eesd_dist.errors import QueueFull
from eesd_dist.schedule.plans import Committed, RoundPlan
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.types import Request, RequestId
from tests.unit.schedule.hash_stages import (
    Ledger,
    ToyStages,
    make_pages,
    run_until_idle,
    toy_answer,
)
from tests.unit.schedule.test_scheduler import _decode_once as decode_once
from tests.unit.schedule.test_scheduler import _request as make_request
from tests.unit.schedule.test_scheduler import _scheduler as make_scheduler
from tests.unit.schedule.test_scheduler import _verifier_says as says

SLOTS = 8
Results = Mapping[RequestId, Committed]


def request(name: str, caller: str, **fields: object) -> Request:
    plain = make_request(name, max_tokens=60, prompt=fields.pop("prompt", [len(name), 2, 3]))
    return dataclasses.replace(plain, caller=caller, **fields)  # type: ignore[arg-type]


def scheduler(num_pages: int = 400) -> Scheduler:
    config = SchedulerConfig(overlap=False, max_running=SLOTS, max_waiting=1000)
    return make_scheduler(make_pages(num_pages), config=config)


def step(scheduler_: Scheduler, stages: ToyStages, ledger: Ledger) -> None:
    plan = scheduler_.plan(0)
    if plan is not None:
        results = stages.run(plan)
        stages.settle(plan)
        ledger.write(scheduler_.commit(plan, results))
        scheduler_.check()


def planned(scheduler_: Scheduler, *, rounds: int) -> Counter[str]:
    """Runs so many rounds; returns the rows of each request, and of each caller."""
    rows: Counter[str] = Counter()
    for _ in range(rounds):
        plan = scheduler_.plan(0)
        assert plan is not None
        for item in plan.items:
            rows[item.live.request_id] += item.num_known
            rows[item.live.request.caller] += item.num_known
        scheduler_.commit(plan, {i.live.request_id: says(9) for i in plan.items if i.is_final})
    return rows


def callers(scheduler_: Scheduler) -> Counter[str]:
    return Counter(live.request.caller for live in scheduler_._running)


def test_one_caller_is_served_in_the_order_of_arrival() -> None:
    scheduler_ = scheduler()
    for at in range(20):
        scheduler_.add(request(f"a{at}", "a"))
    decode_once(scheduler_)
    assert {live.request_id for live in scheduler_._running} == {f"a{at}" for at in range(SLOTS)}
    decode_once(scheduler_)
    assert scheduler_.usage().num_preemptions == 0


def test_a_new_caller_runs_in_the_next_round_up_to_its_share() -> None:
    scheduler_ = scheduler()
    for at in range(100):
        scheduler_.add(request(f"greedy {at}", "greedy"))
    for _ in range(5):
        decode_once(scheduler_)
    assert callers(scheduler_) == {"greedy": SLOTS}
    for at in range(3):
        scheduler_.add(request(f"modest {at}", "modest"))
    decode_once(scheduler_)
    assert callers(scheduler_) == {"greedy": SLOTS - 3, "modest": 3}
    for at in range(3, 30):
        scheduler_.add(request(f"modest {at}", "modest"))
    decode_once(scheduler_)
    assert callers(scheduler_) == {"greedy": SLOTS // 2, "modest": SLOTS // 2}
    preempted = scheduler_.usage().num_preemptions
    for _ in range(20):
        decode_once(scheduler_)
    assert callers(scheduler_) == {"greedy": SLOTS // 2, "modest": SLOTS // 2}
    assert scheduler_.usage().num_preemptions == preempted, "shares that are fair stay"


def test_weights_are_shares() -> None:
    scheduler_ = scheduler()
    for at in range(40):
        scheduler_.add(request(f"small {at}", "small"))
    decode_once(scheduler_)
    for at in range(40):
        scheduler_.add(request(f"large {at}", "large", weight=3.0))
    decode_once(scheduler_)
    assert callers(scheduler_) == {"small": 2, "large": 6}


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    scheduler_ = scheduler()
    for at in range(20):
        scheduler_.add(request(f"batch {at}", "one", priority=5))
    decode_once(scheduler_)
    for at in range(10):
        scheduler_.add(request(f"chat {at}", "one", priority=0))
    decode_once(scheduler_)
    assert Counter(live.request.priority for live in scheduler_._running) == {0: SLOTS}


def test_where_pages_are_what_lacks_callers_share_them() -> None:
    scheduler_ = scheduler(num_pages=16)
    for at in range(20):
        scheduler_.add(request(f"greedy {at}", "greedy"))
    for _ in range(8):
        decode_once(scheduler_)
    assert 1 < len(list(scheduler_._running)) < SLOTS
    scheduler_.add(request("modest", "modest"))
    decode_once(scheduler_)
    assert callers(scheduler_)["modest"] == 1
    scheduler_.check()


def test_a_freed_slot_goes_to_the_caller_with_fewer() -> None:
    scheduler_ = scheduler()
    for at in range(SLOTS):
        scheduler_.add(request(f"first {at}", "a" if at % 2 else "b"))
    for _ in range(10):
        decode_once(scheduler_)
    for at in range(4):
        scheduler_.add(request(f"more of a {at}", "a"))
    scheduler_.add(request("more of b", "b"))
    scheduler_.abort(RequestId("first 0"))  # of b, which so has less
    decode_once(scheduler_)
    running = {live.request_id for live in scheduler_._running}
    assert "more of b" in running


def test_prompts_of_a_caller_that_was_served_less_are_computed_first() -> None:
    """Also when both have begun: of prompts as long, the ones of two callers end together."""
    config = SchedulerConfig(
        overlap=False, max_running=SLOTS, max_waiting=1000, token_budget=16, prefill_chunk=16
    )
    scheduler_ = make_scheduler(make_pages(400), config=config)
    for at in range(SLOTS // 2):
        scheduler_.add(request(f"greedy {at}", "greedy", prompt=[at + 1, *range(1, 48)]))
    scheduler_.add(request("modest", "modest", prompt=list(range(2, 50))))
    rows = planned(scheduler_, rounds=6)
    assert rows["modest"] >= 40
    assert rows["greedy"] >= 40, "it is served in between"


def test_a_caller_that_took_more_than_the_others_still_has_when_it_comes_back() -> None:
    config = SchedulerConfig(
        overlap=False, max_running=SLOTS, max_waiting=1000, token_budget=8, prefill_chunk=8
    )
    scheduler_ = make_scheduler(make_pages(400), config=config)
    scheduler_.add(request("steady", "a", prompt=[1]))
    scheduler_.add(request("large", "b", prompt=list(range(1, 49))))
    for _ in range(9):
        decode_once(scheduler_)
    scheduler_.abort(RequestId("large"))
    scheduler_.add(request("a again", "a", prompt=list(range(3, 40))))
    scheduler_.add(request("b again", "b", prompt=list(range(5, 40))))
    decode_once(scheduler_)  # both have a slot
    decode_once(scheduler_)
    rows = planned(scheduler_, rounds=3)
    assert rows["a again"] > 15
    assert rows["b again"] == 0


def test_a_caller_that_was_alone_owes_nothing_to_one_that_comes_later() -> None:
    config = SchedulerConfig(
        overlap=False, max_running=SLOTS, max_waiting=1000, token_budget=8, prefill_chunk=8
    )
    scheduler_ = make_scheduler(make_pages(400), config=config)
    scheduler_.add(request("alone", "a", prompt=list(range(1, 49))))
    for _ in range(9):
        decode_once(scheduler_)
    scheduler_.abort(RequestId("alone"))
    scheduler_.add(request("of b", "b", prompt=list(range(2, 40))))
    scheduler_.add(request("of a", "a", prompt=list(range(3, 40))))
    rows = planned(scheduler_, rounds=4)
    assert rows["a"] >= 8


def test_a_new_caller_has_saved_nothing() -> None:
    config = SchedulerConfig(
        overlap=False, max_running=SLOTS, max_waiting=1000, token_budget=8, prefill_chunk=8
    )
    scheduler_ = make_scheduler(make_pages(400), config=config)
    scheduler_.add(request("steady", "a", prompt=list(range(1, 49))))
    for _ in range(50):
        decode_once(scheduler_)
    scheduler_.add(request("of b", "b", prompt=list(range(2, 49))))
    scheduler_.add(request("of a", "a", prompt=list(range(3, 49))))
    rows = planned(scheduler_, rounds=6)
    assert rows["of a"] >= 8, "it is served in between"


def test_growing_texts_of_one_caller_do_not_take_the_pages_of_another() -> None:
    scheduler_ = scheduler(num_pages=24)
    for at in range(6):
        scheduler_.add(request(f"greedy {at}", "greedy"))
    decode_once(scheduler_)
    scheduler_.add(request("modest", "modest"))  # the youngest
    preempted: list[RequestId] = []
    for _ in range(30):
        plan = scheduler_.plan(0)
        assert plan is not None
        preempted += plan.preempted
        scheduler_.commit(plan, {i.live.request_id: says(9) for i in plan.items if i.is_final})
    assert preempted
    assert "modest" not in preempted
    scheduler_.check()


def test_nothing_is_preempted_for_a_request_that_still_would_not_fit() -> None:
    scheduler_ = scheduler(num_pages=36)
    scheduler_.add(request("long", "x", prompt=list(range(1, 49)) + list(range(1, 32))))
    scheduler_.add(request("short", "x"))
    for _ in range(3):
        decode_once(scheduler_)
    scheduler_.add(request("larger", "y", prompt=[*range(2, 50), *range(2, 36)]))
    for _ in range(5):
        decode_once(scheduler_)
    assert scheduler_.usage().num_preemptions == 0
    assert callers(scheduler_) == {"x": 2}


def test_a_full_queue_keeps_a_share_for_every_caller() -> None:
    config = SchedulerConfig(overlap=False, max_running=1, max_waiting=8)
    scheduler_ = make_scheduler(make_pages(400), config=config)
    for at in range(8):
        scheduler_.add(request(f"greedy {at}", "greedy"))
    with pytest.raises(QueueFull):
        scheduler_.add(request("one more", "greedy"))
    for at in range(4):
        scheduler_.add(request(f"modest {at}", "modest"))
    with pytest.raises(QueueFull):
        scheduler_.add(request("one more", "modest"))


def test_a_caller_that_comes_back_has_saved_nothing() -> None:
    scheduler_ = scheduler()
    scheduler_.add(request("brief", "b"))
    decode_once(scheduler_)
    scheduler_.abort(RequestId("brief"))
    for at in range(SLOTS + 4):
        scheduler_.add(request(f"long {at}", "a"))
    for _ in range(40):
        decode_once(scheduler_)
    for at in range(SLOTS):
        scheduler_.add(request(f"b {at}", "b"))
    decode_once(scheduler_)
    assert callers(scheduler_) == {"a": SLOTS // 2, "b": SLOTS // 2}


def test_a_queue_of_many_callers_has_a_bound() -> None:
    config = SchedulerConfig(overlap=False, max_running=1, max_waiting=8)
    scheduler_ = make_scheduler(make_pages(400), config=config)
    num_rejected = 0
    for at in range(100):
        try:
            scheduler_.add(request(f"{at}", f"caller {at % 25}"))
        except QueueFull:
            num_rejected += 1
    assert scheduler_.usage().num_waiting == 16
    assert num_rejected == 84


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_plans_are_sound_and_all_work_ends(seed: int) -> None:
    """Long prompts in small chunks, few pages, two microbatches, aborts: what is planned runs and
    has pages, nothing in flight is preempted, and no page is lost."""
    rng = Random(seed)
    config = SchedulerConfig(
        overlap=rng.choice([True, False]),
        max_running=rng.choice([2, 4, 8]),
        max_waiting=50,
        token_budget=rng.choice([4, 8, 24, 512]),
        prefill_chunk=rng.choice([3, 8, 256]),
    )
    pages = make_pages(rng.choice([32, 36, 48, 80, 300]), prefix_caching=rng.random() < 0.6)
    scheduler_ = make_scheduler(pages, config=config, max_model_len=120)
    stages, ledger = ToyStages(page_size=4, random=Random(seed)), Ledger()
    weights = {caller: rng.choice([0.5, 1.0, 3.0, 1000.0]) for caller in "abc"}
    priorities = (0, 0, 1, 2) if seed % 2 else (0,)
    in_flight: dict[int, tuple[RoundPlan, Results]] = {}
    num_requests = 0
    for turn in range(6000):
        if turn < 300 and rng.random() < 0.35:
            caller = rng.choice("abc")
            prompt = [rng.randrange(50) for _ in range(rng.choice([3, 10, 40, 70]))]
            query = request(
                f"q{num_requests}",
                caller,
                prompt=prompt,
                weight=weights[caller],
                priority=rng.choice(priorities),
            )
            num_requests += 1
            with suppress(QueueFull):
                scheduler_.add(query)
        if turn < 300 and num_requests and rng.random() < 0.08:
            scheduler_.abort(
                RequestId(f"q{rng.randrange(max(0, num_requests - 10), num_requests)}")
            )
        microbatch = turn % scheduler_.num_microbatches
        if microbatch in in_flight:
            plan, results = in_flight.pop(microbatch)
            stages.settle(plan)
            ledger.write(scheduler_.commit(plan, results))
        before = [live for live in scheduler_._running if live.in_flight]
        planned = scheduler_.plan(microbatch)
        running = set(scheduler_._running)
        assert all(live.in_flight and live in running for live in before)
        assert len(running) <= config.max_running
        scheduler_.check()
        if planned is not None:
            assert sum(item.num_known for item in planned.items) <= config.token_budget
            for item in planned.items:
                assert item.live in running
                assert item.live not in before
                assert 0 < item.num_known <= len(item.pages) * 4 - item.start
            in_flight[microbatch] = planned, stages.run(planned)
        if turn > 300 and not scheduler_.has_work():
            return
    raise AssertionError("not all work has ended")


@pytest.mark.parametrize("seed", range(20))
def test_texts_do_not_depend_on_callers(seed: int) -> None:
    """Weights differ within a caller too, as while a changed key file is read."""
    rng = Random(seed)
    scheduler_ = scheduler(num_pages=rng.choice([24, 60, 400]))
    requests = [
        request(
            f"{at}",
            rng.choice("abc"),
            weight=rng.choice([0.5, 1.0, 2.0]),
            priority=rng.choice([0, 0, 1]),
        )
        for at in range(40)
    ]
    stages, ledger = ToyStages(page_size=4, random=rng, acceptance=0.6), Ledger()
    for query in requests:
        scheduler_.add(query)
        if rng.random() < 0.3:
            step(scheduler_, stages, ledger)
    run_until_idle(scheduler_, stages, ledger)
    for query in requests:
        expected, _ = toy_answer(query, max_model_len=200)
        assert ledger.answers[query.request_id] == expected
