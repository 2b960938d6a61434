"""Masks that take long: their texts wait, no other does, and beyond a budget they end."""

import dataclasses
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from msgspec import structs

from eesd_dist.config import GrammarConfig
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.local import LocalEngine
from eesd_dist.engine.masks import ConstrainedText, Masks
from eesd_dist.engine.masks.budget import GrammarRecords, MaskBudget
from eesd_dist.engine.masks.lane import MadeMask, MaskJob, MaskLane, MaskResult
from eesd_dist.errors import CapacityError
from eesd_dist.text.grammars import digest_of, one_of, rules
from eesd_dist.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TreeShape,
)
from tests.support.json_codec import JsonCodec, json_grammars
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import texts
from tests.unit.engine.test_grammars import CONSTRAINTS, SAMPLING, requests

CODEC = JsonCodec()
AMBIGUOUS = rules("start: s\ns: s s s s | s s s | s s | /[a-j]/ | /[a-e]/")
"""Each mask takes longer than the one before it: some 10 ms after sixty tokens."""
END = TokenId(2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def attack(number: int, *, max_tokens: int = 200) -> Request:
    return Request(
        request_id=RequestId(f"attack {number}"),
        prompt=(TokenId(5),),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            seed=number,
            grammar=AMBIGUOUS,
            stop_token_ids=(END,),
            logit_bias=((END, -90.0),),
        ),
        caller="attacker",
    )


def masks_of(config: GrammarConfig | None = None, **options: Callable[[], bool]) -> Masks:
    return Masks(grammars=json_grammars(), vocab_size=CODEC.vocab_size, config=config, **options)


def seconds_of(engine: EngineCore, request: Request) -> float:
    """Runs the engine until this request has ended; returns how long it took."""
    started = time.perf_counter()
    engine.add(request)
    while True:
        for emission in engine.step(wait_s=0.0).emissions:
            if emission.request_id == request.request_id and emission.finish_reason is not None:
                return time.perf_counter() - started


@pytest.mark.alone
def test_an_ambiguous_grammar_holds_up_no_other_request(make_config: MakeConfig) -> None:
    local = LocalEngine(make_config("sometimes"), grammars=json_grammars())
    engine = local.engine
    (other,) = requests([""], SAMPLING["warm"], SpeculationParams(), tokens=5)
    (warm,) = requests(["choice"], SAMPLING["warm"], SpeculationParams(), tokens=5)
    local.generate([warm, other, attack(0, max_tokens=10)])  # whatever is compiled
    for number in range(8):
        engine.add(attack(number))
    until, times = time.perf_counter() + 4.0, list[float]()
    while time.perf_counter() < until:
        request = dataclasses.replace(other, request_id=RequestId(f"other {len(times)}"))
        times.append(seconds_of(engine, request))
    assert engine.has_work, "the attack goes on"
    # One after the other their masks take a second and more in each round.
    assert max(times) < 1.0, times
    for number in range(8):
        engine.abort(RequestId(f"attack {number}"))
    local.close()


@pytest.mark.parametrize("shape", ["none", "static", "dynamic"])
@pytest.mark.parametrize("lateness", [0.0, 0.3])
def test_late_masks_change_no_token(
    make_config: MakeConfig, shape: TreeShape, lateness: float
) -> None:
    names = ["", *CONSTRAINTS]
    plain = requests(names, SAMPLING["warm"], SpeculationParams(mode="off"))
    expected = texts(
        LocalEngine(make_config("sometimes"), grammars=json_grammars()).generate(plain)
    )
    rng = random.Random(7)
    masks = masks_of(is_overdue=lambda: rng.random() < lateness)
    for name in CONSTRAINTS:  # half of the grammars are worked on in threads
        grammar = CONSTRAINTS[name].get("grammar")
        if grammar is not None and rng.random() < 0.5:
            masks.records.note(digest_of(grammar), 1.0)
    engine = LocalEngine(make_config("sometimes"), masks=masks)
    drafting = requests(names, SAMPLING["warm"], SpeculationParams(tree=shape))
    generations = engine.generate(drafting)
    assert texts(generations) == expected
    assert sum(sum(generation.drafted) for generation in generations) > 0
    engine.close()


def test_a_resumed_text_goes_on_as_before_with_masks_of_a_thread(make_config: MakeConfig) -> None:
    (request,) = requests(["blanks"], SAMPLING["warm"], SpeculationParams())
    whole = LocalEngine(make_config("sometimes"), grammars=json_grammars()).generate([request])
    tokens = whole[0].tokens
    masks = masks_of()
    masks.records.note(digest_of(request.sampling.grammar or ""), 1.0)
    engine = LocalEngine(make_config("sometimes"), masks=masks)
    resumed = dataclasses.replace(request, generated=tuple(tokens[:20]))
    assert engine.generate([resumed])[0].tokens == tokens[20:]
    engine.close()


def test_a_text_over_its_budget_ends_alone_and_says_why(make_config: MakeConfig) -> None:
    masks = masks_of(GrammarConfig(request_budget_s=0.05, caller_budget_s=100.0))
    engine = LocalEngine(make_config("sometimes"), masks=masks)
    (other,) = requests([""], SAMPLING["warm"], SpeculationParams(), tokens=30)
    expected = LocalEngine(make_config("sometimes")).generate([other])[0].tokens
    emissions = list(engine.stream([attack(1), other]))
    (last,) = (e for e in emissions if e.request_id == "attack 1" and e.finish_reason is not None)
    assert last.finish_reason is FinishReason.ABORT
    assert last.error is not None
    assert "beyond 2 ms each, expected at most 0.05 s for one text" in last.error
    assert [t for e in emissions if e.request_id == other.request_id for t in e.tokens] == expected
    engine.engine.check()
    engine.close()


def test_a_caller_over_its_budget_keeps_its_cheap_grammars(make_config: MakeConfig) -> None:
    cheap = one_of(["a" * 60])
    masks = masks_of(GrammarConfig(request_budget_s=100.0, caller_budget_s=0.05))
    engine = LocalEngine(make_config("sometimes"), masks=masks)
    request = attack(1)
    proven = dataclasses.replace(
        request,
        request_id=RequestId("cheap"),
        sampling=structs.replace(request.sampling, grammar=cheap),
    )
    assert engine.generate([proven])[0].finish_reason is FinishReason.STOP
    assert engine.generate([request])[0].finish_reason is FinishReason.ABORT
    with pytest.raises(CapacityError, match="send a simpler grammar") as refusal:
        engine.engine.add(attack(2))
    assert refusal.value.retry_after_s > 0
    assert engine.generate([proven])[0].finish_reason is FinishReason.STOP
    engine.engine.add(dataclasses.replace(attack(3), caller="another"))
    engine.engine.abort(RequestId("attack 3"))
    engine.close()


def test_what_a_mask_takes_beyond_the_usual_is_charged_and_refilled() -> None:
    clock = Clock()
    config = GrammarConfig(request_budget_s=5.0, caller_budget_s=1.0, caller_refill=0.1)
    budget = MaskBudget(config, clock=clock)
    assert budget.charge("a", 0.002) == 0.0
    assert not budget.is_flagged("a")
    assert budget.charge("a", 1.102) == pytest.approx(1.1)
    assert budget.is_flagged("a")
    assert budget.excess("a", spent_s=1.1) is not None
    assert budget.excess("a", spent_s=0.05) is None
    assert budget.excess("b", spent_s=1.1) is None
    with pytest.raises(CapacityError) as refusal:
        budget.require_credit("a")
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    budget.require_credit("b")
    clock.now_s = 1.5
    budget.require_credit("a")
    clock.now_s = 601.0
    assert not budget.is_flagged("a")


def test_a_costly_grammar_is_slow_until_many_masks_were_cheap() -> None:
    records, grammar = GrammarRecords(), b"g"
    assert not records.is_slow(grammar)
    assert not records.is_proven(grammar)
    for needed in (32, 64, 128):
        records.note(grammar, 0.5)
        for _ in range(needed):
            assert records.is_slow(grammar)
            records.note(grammar, 0.0001)
        assert not records.is_slow(grammar)
        assert records.is_proven(grammar)


@pytest.fixture
def lane() -> Iterator[MaskLane]:
    lane = MaskLane("test", wake=lambda: None)
    yield lane
    lane.close()


def job(name: str, caller: str, run: Callable[[], MadeMask], *, grammar: str) -> MaskJob:
    sampling = SamplingParams(grammar=grammar, stop_token_ids=(END,))
    request = Request(
        request_id=RequestId(name), prompt=(TokenId(3),), sampling=sampling, caller=caller
    )
    text = ConstrainedText(request, None, masks_of(), vocab_size=CODEC.vocab_size)
    return MaskJob(text=text, run=run)


def results_of(lane: MaskLane, count: int) -> list[MaskResult]:
    results: list[MaskResult] = []
    while len(results) < count:
        results += lane.results(wait_s=5.0, limit_s=60.0)
    return results


def test_callers_take_turns_and_so_do_their_grammars(lane: MaskLane) -> None:
    gate, entered = threading.Event(), threading.Event()

    def first() -> MadeMask:
        entered.set()
        gate.wait()
        return MadeMask(b"", 0.0)

    done: Callable[[], MadeMask] = lambda: MadeMask(b"", 0.0)  # noqa: E731
    lane.ask(job("first", "a", first, grammar="g"))
    entered.wait()
    for name, caller, grammar in (
        ("a1", "a", "g"),
        ("a2", "a", "g"),
        ("a3", "a", "h"),
        ("b1", "b", "g"),
    ):
        lane.ask(job(name, caller, done, grammar=grammar))
    gate.set()
    order = [result.text.request_id for result in results_of(lane, 5)]
    assert order == ["first", "b1", "a3", "a1", "a2"]


def test_a_mask_that_takes_too_long_fails_and_keeps_no_other_waiting(lane: MaskLane) -> None:
    gate, entered = threading.Event(), threading.Event()

    def stuck() -> MadeMask:
        entered.set()
        gate.wait()
        return MadeMask(b"late", 0.0)

    def breaks() -> MadeMask:
        raise ValueError("broken")

    lane.ask(job("stuck", "a", stuck, grammar="g"))
    entered.wait()
    lane.ask(job("next", "a", lambda: MadeMask(b"mask", 0.0), grammar="g"))
    assert lane.results(limit_s=60.0) == []
    (overdue,) = lane.results(limit_s=0.0)
    assert overdue.error is not None
    (following,) = results_of(lane, 1)
    assert (following.text.request_id, following.mask) == ("next", b"mask")
    gate.set()
    lane.ask(job("breaks", "a", breaks, grammar="g"))
    (broken,) = results_of(lane, 1)
    assert broken.error == "ValueError: broken"


def test_an_engine_that_is_closed_leaves_no_thread(make_config: MakeConfig) -> None:
    before = set(threading.enumerate())
    engine = LocalEngine(make_config("sometimes"), grammars=json_grammars())
    engine.engine.masks.records.note(digest_of(AMBIGUOUS), 1.0)
    engine.generate([attack(1, max_tokens=5)])
    assert any("masks" in thread.name for thread in set(threading.enumerate()) - before)
    engine.close()
    assert not any("masks" in thread.name for thread in set(threading.enumerate()) - before)


@pytest.mark.alone
def test_other_threads_go_on_while_a_text_is_read() -> None:
    """The library holds the interpreter's lock while one matcher reads by itself."""
    matcher, rng = json_grammars().matcher(AMBIGUOUS), random.Random(3)
    text = [rng.choice(CODEC.encode("abcdefghij")) for _ in range(120)]
    matcher.mask_in_thread(text[:110])  # each of the others takes 20 ms or more
    reading = threading.Thread(target=matcher.mask_in_thread, args=(text,))
    num_turns = 0
    reading.start()
    while reading.is_alive():
        time.sleep(0.001)
        num_turns += 1
    # If the lock were held: one turn for each token, and one for the mask, which drops it.
    assert num_turns > 3 * 10


def test_only_time_on_a_processor_is_counted() -> None:
    """The work has a low priority: on a busy machine it takes many times as long."""
    matcher, rng = json_grammars().matcher(AMBIGUOUS), random.Random(3)
    text = [rng.choice(CODEC.encode("abcdefghij")) for _ in range(60)]
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        before = time.process_time()
        _, seconds = matcher.mask_in_thread(text)
        used = time.process_time() - before
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert 0.01 < seconds <= used
