"""The scheduler with toy stages: every request ends with the tokens of plain decoding."""

import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec import structs

from eesd_dist.config import SchedulerConfig, TreeConfig
from eesd_dist.errors import PromptTooLong, QueueFull, RequestError
from eesd_dist.schedule.live import LiveRequest, salt_of
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.schedule.plans import Committed, PlanItem, RoundPlan
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TokenLogprobs,
)
from tests.unit.schedule.hash_stages import (
    END,
    VOCAB_SIZE,
    Ledger,
    ToyStages,
    make_pages,
    run_until_idle,
    toy_answer,
    toy_token,
)


def _scheduler(
    pages: PageAllocator | None = None,
    *,
    max_model_len: int = 200,
    max_draft_tokens: int = 3,
    clock: Callable[[], float] = lambda: 0.0,
    config: SchedulerConfig | None = None,
    tree: TreeConfig | None = None,
) -> Scheduler:
    return Scheduler(
        config=config or SchedulerConfig(overlap=False),
        pages=pages or make_pages(),
        max_model_len=max_model_len,
        max_draft_tokens=max_draft_tokens,
        vocab_size=VOCAB_SIZE,
        clock=clock,
        tree=tree,
    )


def _request(
    name: str = "a",
    *,
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    max_tokens: int = 10,
    min_tokens: int = 0,
    stop: Sequence[int] = (),
    seed: int = 0,
    speculation: SpeculationParams | None = None,
    generated: Sequence[int] = (),
    cache_salt: str = "",
) -> Request:
    return Request(
        cache_salt=cache_salt,
        request_id=RequestId(name),
        prompt=tuple(map(TokenId, prompt)),
        sampling=SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=tuple(stop), seed=seed
        ),
        speculation=speculation or SpeculationParams(),
        generated=tuple(map(TokenId, generated)),
    )


def _stages(*, page_size: int = 4, acceptance: float = 0.6) -> ToyStages:
    return ToyStages(page_size=page_size, random=Random(7), acceptance=acceptance)


def _plan(scheduler: Scheduler, microbatch: int = 0) -> RoundPlan:
    plan = scheduler.plan(microbatch)
    assert plan is not None
    return plan


def _only(plan: RoundPlan) -> PlanItem:
    (item,) = plan.items
    return item


def _verifier_says(*tokens: int, num_accepted: int = 0, num_drafted: int = 0) -> Committed:
    return Committed(
        tokens=tuple(map(TokenId, tokens)), num_drafted=num_drafted, num_accepted=num_accepted
    )


def _live(scheduler: Scheduler, name: str) -> LiveRequest:
    live = scheduler.live(RequestId(name))
    assert live is not None
    return live


def _decode_once(scheduler: Scheduler, token: int = 9, microbatch: int = 0) -> None:
    plan = _plan(scheduler, microbatch)
    scheduler.commit(
        plan, {item.live.request_id: _verifier_says(token) for item in plan.items if item.is_final}
    )


# Steps of one request.


def test_a_prompt_goes_in_by_chunks_and_only_the_last_gets_a_verdict() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, prefill_chunk=4))
    scheduler.add(_request(prompt=range(10)))
    seen = []
    for _ in range(3):
        plan = _plan(scheduler)
        item = _only(plan)
        seen.append((item.start, item.num_known, item.is_final, item.max_draft))
        scheduler.commit(plan, {RequestId("a"): _verifier_says(7)} if item.is_final else {})
    assert seen == [(0, 4, False, 0), (4, 4, False, 0), (8, 2, True, 3)]
    assert _only(_plan(scheduler)).start == 10


def test_pages_cover_the_rows_and_the_draft_and_no_more() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, prefill_chunk=6))
    scheduler.add(_request(prompt=range(13)))
    first = _plan(scheduler)
    assert len(_only(first).pages) == 2  # positions 0 to 5
    scheduler.commit(first, {})
    _decode_once(scheduler)
    third = _only(_plan(scheduler))
    assert third.start + third.num_known + third.max_draft == 16
    assert len(third.pages) == 4


def test_accepted_tokens_and_the_verifiers_own_move_the_request_on() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(prompt=range(5)))
    plan = _plan(scheduler)
    (emission,) = scheduler.commit(
        plan, {RequestId("a"): _verifier_says(7, 8, 9, num_accepted=2, num_drafted=3)}
    )
    assert emission.tokens == (7, 8, 9)
    assert (emission.num_accepted, emission.num_drafted) == (2, 3)
    assert emission.finish_reason is None
    live = _live(scheduler, "a")
    assert live.num_computed == 7
    assert live.num_generated == 3
    assert live.is_decoding


def test_a_stop_token_leaves_as_the_last_one_and_cuts_what_follows() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(stop=(END,)))
    committed = Committed(
        tokens=(TokenId(7), END, TokenId(8)),
        num_drafted=2,
        num_accepted=2,
        logprobs=tuple(TokenLogprobs(logprob=-i) for i in range(3)),
    )
    (emission,) = scheduler.commit(_plan(scheduler), {RequestId("a"): committed})
    assert emission.tokens == (7, END)
    assert emission.num_accepted == 2
    assert len(emission.logprobs) == 2
    assert emission.finish_reason is FinishReason.STOP
    assert not scheduler.has_work()


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(stop=(END,), min_tokens=2))
    committed = _verifier_says(END, END, END, num_accepted=2, num_drafted=2)
    (emission,) = scheduler.commit(_plan(scheduler), {RequestId("a"): committed})
    assert emission.tokens == (END, END, END)
    assert emission.finish_reason is FinishReason.STOP


def test_a_text_ends_where_the_model_ends() -> None:
    scheduler = _scheduler(max_model_len=8)
    scheduler.add(_request(prompt=range(5), max_tokens=100))
    item = _only(plan := _plan(scheduler))
    assert item.max_draft == 2
    (emission,) = scheduler.commit(
        plan, {RequestId("a"): _verifier_says(1, 2, 3, num_accepted=2, num_drafted=2)}
    )
    assert emission.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (_request(), 3),
        (_request(max_tokens=3), 2),
        (_request(max_tokens=1), 0),
        (_request(speculation=SpeculationParams(mode="off")), 0),
        (_request(speculation=SpeculationParams(max_draft_tokens=2)), 2),
        (_request(speculation=SpeculationParams(max_draft_tokens=99)), 3),
    ],
)
def test_no_request_drafts_more_than_it_can_use(request_: Request, expected: int) -> None:
    scheduler = _scheduler()
    scheduler.add(request_)
    assert _only(_plan(scheduler)).max_draft == expected


def test_a_resumed_request_goes_on_where_it_was() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(prompt=range(5), generated=(7, 8), max_tokens=4))
    item = _only(plan := _plan(scheduler))
    assert (item.start, item.num_known, item.is_final, item.max_draft) == (0, 7, True, 1)
    (emission,) = scheduler.commit(
        plan, {RequestId("a"): _verifier_says(9, 10, num_accepted=1, num_drafted=1)}
    )
    assert emission.tokens == (9, 10)
    assert emission.finish_reason is FinishReason.LENGTH


# Admission.


def _with(**sampling: Any) -> Request:
    request = _request()
    return dataclasses.replace(request, sampling=structs.replace(request.sampling, **sampling))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (_request(prompt=()), RequestError, "empty"),
        (_request(prompt=[1] * 40), PromptTooLong, "cut 1"),
        (_request(prompt=[1, VOCAB_SIZE]), RequestError, f"token {VOCAB_SIZE}"),
        (_request(prompt=[1, -1]), RequestError, "token -1"),
        (_request(generated=[VOCAB_SIZE]), RequestError, f"token {VOCAB_SIZE}"),
        (_request(max_tokens=0), RequestError, "at least 1"),
        (_request(max_tokens=2, generated=(3, 3)), RequestError, "nothing is left"),
        (_with(top_k=2**31), RequestError, "top_k is 2147483648: give 0 to"),
        (_with(min_tokens=-1), RequestError, "min_tokens is -1"),
        (_with(seed=2**64), RequestError, "64 bits"),
        (_with(stop_token_ids=(2, 2**31)), RequestError, "stop_token_ids are"),
        (_request(max_tokens=30), RequestError, r"need 9 pages .* \(32 tokens\).*kv_cache_bytes"),
    ],
)
def test_what_can_never_be_served_is_refused(
    request_: Request, error: type[RequestError], message: str
) -> None:
    scheduler = _scheduler(make_pages(8), max_model_len=40)
    with pytest.raises(error, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work()


def test_a_request_that_fills_all_pages_to_the_last_position_is_served() -> None:
    scheduler, stages, ledger = _scheduler(make_pages(8)), _stages(), Ledger()
    request = _request(prompt=[1] * 23, max_tokens=10)  # 32 positions are computed
    scheduler.add(request)
    scheduler.add(_request("b"))
    run_until_idle(scheduler, stages, ledger)
    assert ledger.answers[RequestId("a")] == toy_answer(request, max_model_len=200)[0]


def test_a_full_queue_refuses_the_next_and_says_so() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, max_running=1, max_waiting=2))
    scheduler.add(_request("a"))
    scheduler.add(_request("b"))
    with pytest.raises(QueueFull, match=r"2 requests are waiting .* scheduler\.max_waiting"):
        scheduler.add(_request("c"))
    scheduler.plan(0)
    scheduler.add(_request("c"))
    assert (scheduler.num_running, scheduler.usage().num_waiting) == (1, 2)


def test_a_request_that_has_begun_in_another_pipeline_is_not_refused_for_a_full_queue() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, max_running=1, max_waiting=1))
    scheduler.add(_request("a"))
    scheduler.add(_request("b", generated=[3]))
    assert scheduler.usage().num_waiting == 2


def test_an_id_that_is_being_served_is_refused() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a"))
    with pytest.raises(RequestError, match="served already"):
        scheduler.add(_request("a"))


def test_the_queue_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler = _scheduler(make_pages(8))
    scheduler.add(_request("a", prompt=[1] * 16))
    scheduler.add(_request("b", prompt=[2] * 20, max_tokens=2))
    scheduler.add(_request("c", prompt=[3]))
    assert [item.live.request_id for item in _plan(scheduler).items] == ["a"]
    assert scheduler.usage().num_waiting == 2


# Sharing a round.


def test_decoding_comes_first_and_prefill_takes_what_is_left_of_the_budget() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, token_budget=10, prefill_chunk=8))
    scheduler.add(_request("a", max_tokens=50))
    _decode_once(scheduler)
    scheduler.add(_request("b", prompt=range(20)))
    scheduler.add(_request("c", prompt=range(20, 40)))
    plan = _plan(scheduler)
    assert [(i.live.request_id, i.num_known) for i in plan.items] == [("a", 1), ("b", 8), ("c", 1)]


def test_more_decoding_requests_than_budget_take_turns() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, token_budget=5))
    for name in "abcdefgh":
        scheduler.add(_request(name, prompt=[1], max_tokens=40, seed=ord(name)))
    for plan in [_plan(scheduler), _plan(scheduler)]:  # two rounds admit all requests
        scheduler.commit(plan, {i.live.request_id: _verifier_says(1) for i in plan.items})
    turns = dict.fromkeys("abcdefgh", 0)
    for _ in range(32):
        plan = _plan(scheduler)
        for item in plan.items:
            turns[item.live.request_id] += 1
        scheduler.commit(plan, {i.live.request_id: _verifier_says(1) for i in plan.items})
    assert sum(turns.values()) == 32 * 5
    assert max(turns.values()) - min(turns.values()) <= 1


def test_no_request_starves_while_new_requests_keep_coming() -> None:
    config = SchedulerConfig(overlap=True, max_running=4, token_budget=6, prefill_chunk=4)
    scheduler, stages, ledger = _scheduler(make_pages(14), config=config), _stages(), Ledger()
    scheduler.add(_request("long", prompt=range(20), max_tokens=30))
    for index in range(300):
        if scheduler.usage().num_waiting < 3:
            scheduler.add(_request(f"short{index}", prompt=[index % 50] * 6, max_tokens=4))
        plan = scheduler.plan(index % 2)
        if plan is not None:
            ledger.write(scheduler.commit(plan, stages.run(plan)))
        if RequestId("long") in ledger.reasons:
            break
    assert index < 200
    run_until_idle(scheduler, stages, ledger)


# Microbatches.


def test_a_request_alone_stays_in_one_microbatch() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=True))
    scheduler.add(_request())
    for _ in range(4):
        plan = _plan(scheduler, 0)
        assert scheduler.plan(1) is None
        scheduler.commit(plan, {RequestId("a"): _verifier_says(3)})


def test_two_requests_share_the_two_microbatches() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=True))
    scheduler.add(_request("a"))
    scheduler.add(_request("b"))
    assert _only(_plan(scheduler, 0)).live.request_id == "a"
    assert _only(_plan(scheduler, 1)).live.request_id == "b"


def test_a_microbatch_that_empties_gets_requests_from_the_other() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=True))
    for name, max_tokens in (("a", 1), ("b", 50), ("c", 1), ("d", 50)):
        scheduler.add(_request(name, max_tokens=max_tokens))
    first, in_flight = _plan(scheduler, 0), _plan(scheduler, 1)
    scheduler.commit(first, {RequestId(n): _verifier_says(3) for n in "ac"})
    assert scheduler.plan(0) is None  # both are in flight: none can move
    scheduler.commit(in_flight, {RequestId(n): _verifier_says(3) for n in "bd"})
    assert _only(_plan(scheduler, 0)).live.request_id == "d"
    assert _only(_plan(scheduler, 1)).live.request_id == "b"


def test_a_request_in_flight_is_not_planned_again() -> None:
    scheduler = _scheduler()
    scheduler.add(_request())
    plan = _plan(scheduler)
    assert scheduler.plan(0) is None
    scheduler.commit(plan, {RequestId("a"): _verifier_says(3)})
    with pytest.raises(AssertionError, match="committed once"):
        scheduler.commit(plan, {RequestId("a"): _verifier_says(3)})


# When pages run short.


def test_drafts_shrink_before_a_request_is_preempted() -> None:
    scheduler = _scheduler(make_pages(4), max_draft_tokens=6)
    scheduler.add(_request("a", prompt=[1] * 4, max_tokens=9))
    scheduler.add(_request("b", prompt=[2] * 4, max_tokens=9))
    _decode_once(scheduler)
    plan = _plan(scheduler)
    assert plan.preempted == ()
    assert [item.max_draft for item in plan.items] == [3, 3]
    scheduler.check()


def test_the_youngest_gives_way_keeps_its_tokens_and_comes_back_first() -> None:
    scheduler, stages, ledger = _scheduler(make_pages(6, page_size=4)), _stages(), Ledger()
    requests = [_request(n, prompt=[i + 1] * 6, max_tokens=12) for i, n in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    preempted: list[str] = []
    for _ in range(200):
        plan = scheduler.plan(0)
        if plan is None:
            break
        preempted += plan.preempted
        ledger.write(scheduler.commit(plan, stages.run(plan)))
        scheduler.check()
    assert preempted
    assert "a" not in preempted
    for request in requests:
        answer, reason = toy_answer(request, max_model_len=200)
        assert ledger.answers[request.request_id] == answer
        assert ledger.reasons[request.request_id] is reason


def test_a_preempted_request_finds_its_own_pages_again_when_they_were_not_needed() -> None:
    scheduler = _scheduler(make_pages(7))
    scheduler.add(_request("a", prompt=[1] * 11, max_tokens=12))
    scheduler.add(_request("b", prompt=[2] * 11, max_tokens=12))
    for _ in range(2):
        _decode_once(scheduler)
    scheduler.add(_request("c", prompt=[3] * 3))
    victim = _live(scheduler, "b")
    plan = _plan(scheduler)
    while not plan.preempted:
        results = {item.live.request_id: _verifier_says(9) for item in plan.items}
        scheduler.commit(plan, results)
        plan = _plan(scheduler)
    assert plan.preempted == ("b",)
    num_tokens = victim.num_tokens
    assert scheduler.abort(RequestId("a"))
    scheduler.commit(plan, {})
    item = _plan(scheduler).items[0]
    assert item.live is victim  # before c, which came later
    assert item.start > 0
    assert item.start + item.num_known == num_tokens


def test_a_draft_leaves_the_page_another_request_may_need_next() -> None:
    scheduler = _scheduler(make_pages(6), max_draft_tokens=6)
    scheduler.add(_request("a", prompt=[1] * 7, max_tokens=9))
    scheduler.add(_request("b", prompt=[2] * 7, max_tokens=9))
    _decode_once(scheduler)
    assert [item.max_draft for item in _plan(scheduler).items] == [4, 0]


def test_pages_meant_for_drafts_are_taken_back_before_a_request_is_preempted() -> None:
    config = SchedulerConfig(overlap=True)
    scheduler = _scheduler(make_pages(30, page_size=1), max_draft_tokens=4, config=config)
    scheduler.add(_request("a", prompt=[1] * 2))
    scheduler.add(_request("b", prompt=[2] * 2))
    _decode_once(scheduler, microbatch=0)
    _decode_once(scheduler, microbatch=1)
    assert len(_live(scheduler, "b").pages) == 6
    scheduler.add(_request("c", prompt=[3] * 17))
    accepted = _verifier_says(5, 5, 5, 5, num_accepted=3, num_drafted=3)
    scheduler.commit(
        _plan(scheduler, 0), {RequestId("a"): accepted, RequestId("c"): _verifier_says(5)}
    )
    plan = _plan(scheduler, 0)
    assert [item.live.request_id for item in plan.items] == ["a", "c"]
    assert plan.preempted == ()
    assert len(_live(scheduler, "b").pages) == 3
    scheduler.check()


def test_a_round_in_flight_keeps_its_pages_and_the_other_microbatch_waits() -> None:
    config = SchedulerConfig(overlap=True)
    scheduler = _scheduler(make_pages(12, page_size=1), max_draft_tokens=4, config=config)
    scheduler.add(_request("a", prompt=[1] * 2))
    scheduler.add(_request("b", prompt=[2] * 2))
    in_flight = _plan(scheduler, 0)
    accepted = _verifier_says(5, 5, 5, 5, num_accepted=3, num_drafted=3)
    scheduler.commit(_plan(scheduler, 1), {RequestId("b"): accepted})
    _decode_once(scheduler, microbatch=1)
    assert scheduler.plan(1) is None
    assert scheduler.num_running == 2
    assert len(_live(scheduler, "a").pages) == 6
    all_of_it = _verifier_says(5, 5, 5, 5, 5, num_accepted=4, num_drafted=4)
    scheduler.commit(in_flight, {RequestId("a"): all_of_it})
    assert _only(_plan(scheduler, 0)).live.request_id == "a"
    scheduler.check()


def test_a_request_that_gave_way_with_no_round_to_tell_it_is_named_in_the_next() -> None:
    config = SchedulerConfig(overlap=True)
    scheduler = _scheduler(make_pages(6, page_size=1), max_draft_tokens=0, config=config)
    scheduler.add(_request("a", prompt=[1] * 2, max_tokens=5))
    scheduler.add(_request("b", prompt=[2] * 2, max_tokens=5))
    for microbatch in (0, 1, 0, 1):
        _decode_once(scheduler, microbatch=microbatch)
    assert scheduler.plan(1) is None
    assert (scheduler.num_running, scheduler.usage().num_waiting) == (1, 1)
    scheduler.abort(RequestId("a"))
    plan = _plan(scheduler, 0)
    assert plan.preempted == ("b",)
    assert _only(plan).live.request_id == "b"


# Prefixes.


def test_an_aborted_request_that_comes_back_with_its_tokens_starts_behind_its_pages() -> None:
    scheduler, stages = _scheduler(), _stages()
    scheduler.add(_request(prompt=range(18), max_tokens=100))
    generated: list[int] = []
    while len(generated) < 20:
        plan = _plan(scheduler)
        for emission in scheduler.commit(plan, stages.run(plan)):
            generated += emission.tokens
    assert scheduler.abort(RequestId("a"))
    scheduler.add(_request(prompt=range(18), max_tokens=100, generated=generated))
    num_tokens = 18 + len(generated)
    assert _only(_plan(scheduler)).start == (num_tokens - 1) // 4 * 4, "all full pages were found"


@pytest.mark.parametrize(
    ("salt", "num_cached"), [("alice\n", 16), ("bob\n", 0), ("alice\nx", 0), ("", 0)]
)
def test_a_prompt_is_found_only_by_requests_with_its_salt(salt: str, num_cached: int) -> None:
    scheduler, stages, ledger = _scheduler(), _stages(), Ledger()
    prompt = range(18)
    scheduler.add(_request("first", prompt=prompt, cache_salt="alice\n"))
    run_until_idle(scheduler, stages, ledger)
    scheduler.add(_request("guess", prompt=prompt, cache_salt=salt))
    assert _only(_plan(scheduler)).start == num_cached


def test_two_salts_are_two_roots_whatever_they_contain() -> None:
    salts = ["", "plain", "exit 0", "exit 0\n", "\n", "\ud800", "é"]
    roots = {
        salt_of(drafts=drafts, drafter=drafter, cache_salt=salt)
        for drafts in (False, True)
        for drafter in range(3)
        for salt in salts
    }
    assert len(roots) == len(salts) * 4, "one without drafts, and one for each drafter"
    pages = make_pages()
    for salt in roots:
        table = pages.match_prefix([1] * 9, salt=salt)
        assert table == []
        table = pages.allocate(2) or []
        pages.register([1] * 8, table, num_computed=8, salt=salt)
        assert pages.match_prefix([1] * 9, salt=salt) == table


def test_a_prompt_that_begins_like_an_earlier_one_starts_behind_its_pages() -> None:
    scheduler, stages, ledger = _scheduler(), _stages(), Ledger()
    scheduler.add(_request("a", prompt=range(18)))
    run_until_idle(scheduler, stages, ledger)
    scheduler.add(_request("b", prompt=[*range(16), 40, 41, 42]))
    scheduler.add(_request("c", prompt=range(18), speculation=SpeculationParams(mode="off")))
    plan = _plan(scheduler)
    assert [item.start for item in plan.items] == [16, 0]
    emission, _ = scheduler.commit(plan, stages.run(plan))
    assert emission.num_cached_prompt_tokens == 16
    usage = scheduler.usage()
    assert (usage.num_prompt_tokens, usage.num_cached_prompt_tokens) == (18 + 19 + 18, 16)


def test_an_answer_is_part_of_the_next_turns_prefix() -> None:
    scheduler, stages, ledger = _scheduler(), _stages(), Ledger()
    scheduler.add(_request("a", prompt=range(6), max_tokens=11))
    run_until_idle(scheduler, stages, ledger)
    scheduler.add(_request("b", prompt=[*range(6), *ledger.answers[RequestId("a")], 1, 2, 3]))
    assert _only(_plan(scheduler)).start == 16


# Ends.


def test_an_aborted_request_in_flight_keeps_its_pages_until_its_round_is_over() -> None:
    pages = make_pages(prefix_caching=False)
    scheduler = _scheduler(pages)
    scheduler.add(_request())
    plan = _plan(scheduler)
    assert scheduler.abort(RequestId("a"))
    assert not scheduler.abort(RequestId("a"))
    assert pages.num_free < 64
    assert scheduler.commit(plan, {}) == []
    assert pages.num_free == 64
    assert not scheduler.has_work()
    scheduler.check()


def test_a_request_that_takes_an_aborted_ones_id_waits_for_its_round_and_no_longer() -> None:
    scheduler = _scheduler()
    scheduler.add(_request())
    plan = _plan(scheduler)
    scheduler.abort(RequestId("a"))
    scheduler.add(_request(prompt=[7, 8]))
    with pytest.raises(RequestError, match="being served already"):
        scheduler.add(_request())
    scheduler.add(_request("b"))
    assert [item.live.request_id for item in _plan(scheduler).items] == ["b"]
    assert scheduler.commit(plan, {}) == []
    assert _live(scheduler, "a").tokens == [7, 8]
    assert [item.live.tokens for item in _plan(scheduler).items] == [[7, 8]]
    scheduler.check()


def test_a_request_that_waits_for_the_id_of_an_aborted_one_can_be_aborted() -> None:
    scheduler = _scheduler()
    scheduler.add(_request())
    plan = _plan(scheduler)
    scheduler.abort(RequestId("a"))
    scheduler.add(_request(prompt=[7, 8]))
    assert scheduler.abort(RequestId("a"))
    assert not scheduler.abort(RequestId("a"))
    assert scheduler.commit(plan, {}) == []
    assert not scheduler.has_work()


def test_an_aborted_request_at_rest_or_in_the_queue_is_gone_at_once() -> None:
    pages = make_pages(prefix_caching=False)
    scheduler = _scheduler(pages)
    scheduler.add(_request("a"))
    _decode_once(scheduler)
    scheduler.add(_request("b"))
    assert scheduler.abort(RequestId("a"))
    assert scheduler.abort(RequestId("b"))
    assert not scheduler.abort(RequestId("c"))
    assert not scheduler.has_work()
    assert pages.num_free == 64


def test_after_a_store_is_lost_every_stream_goes_on_to_the_same_end() -> None:
    config = SchedulerConfig(overlap=True, max_running=3)
    scheduler, stages, ledger = _scheduler(config=config), _stages(), Ledger()
    requests = [_request(n, prompt=[i] * 9, max_tokens=20, seed=i) for i, n in enumerate("abcde")]
    for request in requests:
        scheduler.add(request)
    for microbatch in (0, 1, 0, 1):
        plan = _plan(scheduler, microbatch)
        ledger.write(scheduler.commit(plan, stages.run(plan)))
    lost = _plan(scheduler, 0)
    stages.lose()
    assert scheduler.reset_computed() == ["a", "b", "c"]
    scheduler.check()
    with pytest.raises(AssertionError, match="not after a reset"):
        scheduler.commit(lost, {})
    assert [scheduler.live(request.request_id) is None for request in requests] == [False] * 5
    resumed = _plan(scheduler, 0)
    assert [item.live.request_id for item in resumed.items] == ["a", "c"]
    ledger.write(scheduler.commit(resumed, stages.run(resumed)))
    run_until_idle(scheduler, stages, ledger)
    for request in requests:
        assert ledger.answers[request.request_id] == toy_answer(request, max_model_len=200)[0]


def test_after_a_store_is_lost_no_page_is_held_and_no_prefix_found() -> None:
    pages = make_pages()
    scheduler = _scheduler(pages, config=SchedulerConfig(overlap=False, max_running=2))
    for name in "abcd":
        scheduler.add(_request(name))
    scheduler.plan(0)
    scheduler.abort(RequestId("b"))
    assert scheduler.reset_computed() == ["a"]
    assert (pages.num_free, pages.num_cached) == (64, 0)
    scheduler.check()


def test_arrival_and_first_round_are_timed() -> None:
    times = iter([1.0, 2.5])
    scheduler = _scheduler(clock=lambda: next(times))
    scheduler.add(_request())
    live = _live(scheduler, "a")
    waited = live.first_scheduled_s is None
    scheduler.plan(0)
    assert waited
    assert (live.arrival_s, live.first_scheduled_s) == (1.0, 2.5)


# All of these together.


def test_a_tree_has_room_for_its_tokens_and_a_chain_for_its_length() -> None:
    tree = TreeConfig(shape="static", max_nodes=9)
    for requested, max_nodes in ((None, 9), ("dynamic", 9), ("none", 0)):
        scheduler = _scheduler(tree=tree)
        scheduler.add(_request(speculation=SpeculationParams(tree=requested)))
        item = _only(_plan(scheduler))
        assert (item.max_draft, item.max_nodes) == (3, max_nodes)
        assert len(item.pages) == -(-(5 + (max_nodes or 3)) // 4)


def test_a_tree_takes_the_pages_that_can_be_spared_and_no_others() -> None:
    scheduler = _scheduler(make_pages(4), tree=TreeConfig(shape="dynamic", max_nodes=20))
    scheduler.add(_request("old", max_tokens=4))
    scheduler.add(_request("young", prompt=[9, 9], max_tokens=4))
    old, young = _plan(scheduler).items
    # They need two pages and one; the fourth may be the next page of young.
    assert (old.max_draft, old.max_nodes) == (3, 3)
    assert (young.max_draft, young.max_nodes) == (2, 2)
    scheduler.check()


def test_a_request_at_its_end_draws_no_tree() -> None:
    scheduler = _scheduler(tree=TreeConfig(shape="static"))
    scheduler.add(_request(max_tokens=1))
    item = _only(_plan(scheduler))
    assert (item.max_draft, item.max_nodes) == (0, 0)


def _each_says(plan: RoundPlan, token: int) -> dict[RequestId, Committed]:
    return {item.live.request_id: _verifier_says(token) for item in plan.items}


def test_without_overlap_all_requests_come_together_in_the_first_microbatch() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=True))
    for name in ("a", "b", "c", "d"):
        scheduler.add(_request(name))
    first, second = scheduler.plan(0), scheduler.plan(1)
    assert first is not None
    assert second is not None
    scheduler.set_overlap(False)
    scheduler.commit(first, _each_says(first, 3))
    third = scheduler.plan(0)
    assert third is not None
    assert len(third.items) == len(first.items)  # the others are still in flight
    scheduler.commit(second, _each_says(second, 3))
    assert scheduler.plan(1) is None
    scheduler.commit(third, _each_says(third, 3))
    assert len(_plan(scheduler).items) == 4


class AnyOrder(RuleBasedStateMachine):
    """Requests are added, planned, committed, aborted and lose their stores, in any order."""

    @initialize(
        overlap=st.booleans(),
        num_pages=st.integers(5, 30),
        page_size=st.sampled_from([1, 2, 4]),
        prefix_caching=st.booleans(),
        max_running=st.integers(1, 5),
        token_budget=st.integers(1, 12),
        prefill_chunk=st.integers(1, 8),
        max_draft_tokens=st.integers(0, 4),
        max_nodes=st.integers(1, 9),
        seed=st.integers(0, 9),
    )
    def start(
        self,
        overlap: bool,
        num_pages: int,
        page_size: int,
        prefix_caching: bool,
        max_running: int,
        token_budget: int,
        prefill_chunk: int,
        max_draft_tokens: int,
        max_nodes: int,
        seed: int,
    ) -> None:
        self.pages = make_pages(num_pages, page_size, prefix_caching=prefix_caching)
        self.max_model_len = num_pages * page_size + 1
        self.scheduler = _scheduler(
            self.pages,
            max_model_len=self.max_model_len,
            max_draft_tokens=max_draft_tokens,
            config=SchedulerConfig(
                overlap=overlap,
                max_running=max_running,
                max_waiting=6,
                token_budget=token_budget,
                prefill_chunk=prefill_chunk,
            ),
            tree=TreeConfig(max_nodes=max_nodes),
        )
        self.stages = ToyStages(page_size=page_size, random=Random(seed))
        self.ledger = Ledger()
        self.requests: list[Request] = []
        self.aborted: set[RequestId] = set()
        self.pending: dict[int, tuple[RoundPlan, dict[RequestId, Committed]]] = {}

    @rule(
        begin=st.integers(0, 2),
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 4),
        seed=st.integers(0, 5),
        num_generated=st.integers(0, 3),
        drafts=st.sampled_from(["off", "none", "static", "dynamic"]),
    )
    def add(
        self,
        begin: int,
        length: int,
        max_tokens: int,
        min_tokens: int,
        seed: int,
        num_generated: int,
        drafts: Literal["off", "none", "static", "dynamic"],
    ) -> None:
        length = min(length, self.max_model_len - 1)
        plain = _request(
            f"r{len(self.requests)}",
            prompt=[begin] * length,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=(END, 0, 1, 2, 3),
            seed=seed,
            speculation=(
                SpeculationParams(mode="off") if drafts == "off" else SpeculationParams(tree=drafts)
            ),
        )
        answer, _ = toy_answer(plain, max_model_len=self.max_model_len)
        sampling, generated = plain.sampling, answer[: min(num_generated, len(answer) - 1)]
        request = Request(
            request_id=plain.request_id,
            prompt=plain.prompt,
            sampling=sampling,
            speculation=plain.speculation,
            generated=tuple(generated),
        )
        if self.scheduler.usage().num_waiting >= 6 and not generated:
            with pytest.raises(QueueFull):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests.append(request)
        self.ledger.answers[request.request_id] = list(generated)

    @rule(overlap=st.booleans())
    def set_overlap(self, overlap: bool) -> None:
        self.scheduler.set_overlap(overlap)

    @rule(microbatch=st.integers(0, 1))
    def plan(self, microbatch: int) -> None:
        if microbatch >= self.scheduler.num_microbatches or microbatch in self.pending:
            return
        plan = self.scheduler.plan(microbatch)
        if plan is None:
            return
        assert plan.microbatch == microbatch
        assert sum(item.num_known for item in plan.items) <= 12
        self.pending[microbatch] = (plan, self.stages.run(plan))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        plan, results = self.pending.pop(data.draw(st.sampled_from(sorted(self.pending))))
        self.stages.settle(plan)
        emissions = self.scheduler.commit(plan, results)
        assert not self.aborted & {emission.request_id for emission in emissions}
        self.ledger.write(emissions)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.requests)).request_id
        is_live = request_id not in self.ledger.reasons and request_id not in self.aborted
        assert self.scheduler.abort(request_id) == is_live
        self.aborted.add(request_id)

    @precondition(lambda self: self.aborted and self.scheduler.usage().num_waiting < 6)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.aborted)))
        request = next(r for r in self.requests if r.request_id == request_id)
        self.scheduler.add(request)
        self.aborted.remove(request_id)
        self.ledger.answers[request_id] = list(request.generated)
        self.ledger.reasons.pop(request_id, None)

    @rule()
    def lose_a_stage(self) -> None:
        self.stages.lose()
        self.pending.clear()
        self.scheduler.reset_computed()

    @invariant()
    def pages_are_conserved(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    @invariant()
    def there_is_always_a_next_step(self) -> None:
        if not hasattr(self, "scheduler") or self.pending or not self.scheduler.has_work():
            return
        for microbatch in range(self.scheduler.num_microbatches):
            self.plan(microbatch)
        assert self.pending

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for plan, results in self.pending.values():
            self.stages.settle(plan)
            self.ledger.write(self.scheduler.commit(plan, results))
        run_until_idle(self.scheduler, self.stages, self.ledger)
        assert self.pages.num_free == self.pages.num_pages
        for request in self.requests:
            if request.request_id in self.aborted:
                continue
            answer, reason = toy_answer(request, max_model_len=self.max_model_len)
            assert self.ledger.answers[request.request_id] == answer
            assert self.ledger.reasons[request.request_id] is reason


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_crowd_in_few_pages_gets_the_tokens_of_plain_decoding(
    acceptance: float, overlap: bool
) -> None:
    random = Random(3)
    config = SchedulerConfig(overlap=overlap, max_running=8, token_budget=24, prefill_chunk=10)
    tree = TreeConfig(max_nodes=11)
    scheduler = _scheduler(make_pages(24), config=config, max_draft_tokens=5, tree=tree)
    stages, ledger = _stages(acceptance=acceptance), Ledger()
    requests = [
        _request(
            f"r{i}",
            prompt=[random.randrange(2)] * random.randint(1, 30),
            max_tokens=random.randint(1, 30),
            stop=(END,),
            seed=i,
            speculation=SpeculationParams(
                mode=random.choice(["auto", "auto", "off"]),
                tree=random.choice(["none", "static", "dynamic"]),
            ),
        )
        for i in range(40)
    ]
    for request in requests:
        scheduler.add(request)
    run_until_idle(scheduler, stages, ledger)
    assert scheduler.usage().num_preemptions > 0
    assert scheduler.usage().num_cached_prompt_tokens > 0
    for request in requests:
        answer, reason = toy_answer(request, max_model_len=200)
        assert ledger.answers[request.request_id] == answer
        assert ledger.reasons[request.request_id] is reason


def test_the_toy_answers_are_neither_all_long_nor_all_short() -> None:
    stops = sum(END in [toy_token(i, seed) for i in range(30)] for seed in range(100))
    assert 20 < stops < 80


@pytest.mark.parametrize("overlap", [False, True])
def test_planning_sixteen_decoding_requests_takes_under_a_millisecond(overlap: bool) -> None:
    config = SchedulerConfig(overlap=overlap, token_budget=4_000)
    scheduler = _scheduler(
        make_pages(512, 32), max_model_len=1_000, max_draft_tokens=8, config=config
    )
    for index in range(16):
        scheduler.add(_request(f"r{index}", prompt=[index] * 100, max_tokens=800))
    timings_s = []
    for turn in range(100):
        started_s = perf_counter()
        plan = _plan(scheduler, turn % scheduler.num_microbatches)
        timings_s.append(perf_counter() - started_s)
        committed = _verifier_says(1, 2, 3, num_accepted=2, num_drafted=4)
        scheduler.commit(plan, {item.live.request_id: committed for item in plan.items})
    assert min(timings_s) < 1e-3  # the fastest, since other work may run


# Requests that wait for their masks.


def _names(plan: RoundPlan | None) -> set[str]:
    return set() if plan is None else {item.live.request_id for item in plan.items}


def test_a_request_without_a_mask_sits_the_round_out() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, prefill_chunk=4))
    for name in "ab":
        scheduler.add(_request(name))
    unmasked = {RequestId("a")}
    assert _names(scheduler.plan(0, lacks_mask=unmasked.__contains__)) == {"b"}
    scheduler.reset_computed()
    assert _names(scheduler.plan(0)) == {"a", "b"}
    scheduler.reset_computed()
    plan = _plan(scheduler)
    scheduler.commit(plan, {})
    plan_or_none = scheduler.plan(0, lacks_mask=lambda _: True)  # the last tokens of both are left
    assert plan_or_none is None
    assert scheduler.has_work()
    assert _names(scheduler.plan(0, lacks_mask=unmasked.__contains__)) == {"b"}
    scheduler.check()


def test_a_prompt_is_computed_up_to_its_last_token_before_its_mask_is_there() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, prefill_chunk=4))
    scheduler.add(_request(prompt=range(10)))
    scheduler.commit(_plan(scheduler), {})
    rows = []
    while (plan := scheduler.plan(0, lacks_mask=lambda _: True)) is not None:
        rows.append(_only(plan).num_known)
        assert not _only(plan).is_final
        scheduler.commit(plan, {})
    assert rows == [4, 1]
    assert _only(_plan(scheduler)).is_final


def test_requests_that_wait_for_masks_hold_no_slot_that_others_need() -> None:
    scheduler = _scheduler(config=SchedulerConfig(overlap=False, max_running=2))
    unmasked = {RequestId("a"), RequestId("b")}
    for name in "ab":
        scheduler.add(_request(name))
    _decode_once(scheduler)
    assert scheduler.plan(0, lacks_mask=unmasked.__contains__) is None
    for name in "cd":
        scheduler.add(_request(name))
    plan = scheduler.plan(0, lacks_mask=unmasked.__contains__)
    assert _names(plan) == {"c", "d"}
    assert plan is not None
    assert set(plan.preempted) == unmasked
    results = {request_id: _verifier_says(9) for request_id in map(RequestId, "cd")}
    scheduler.commit(plan, results)
    scheduler.abort(RequestId("c"))
    assert _names(scheduler.plan(0)) == {"a", "d"}
    scheduler.check()
