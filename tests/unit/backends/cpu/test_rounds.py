"""A round's compiled calls against the same round step by step: equal to the last bit."""

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs

from eesd_dist.backends import lazy
from eesd_dist.backends.api import ChainStart, DraftedChain
from eesd_dist.backends.cpu import calls
from eesd_dist.backends.cpu.drafter import RoundDrafter
from eesd_dist.backends.cpu.kernels import draft as draft_kernels
from eesd_dist.backends.cpu.kernels import verify as verify_kernels
from eesd_dist.backends.cpu.verifier import Verifier
from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.backends.row_slices import RowSlice
from eesd_dist.config import DType, EngineConfig, SchedulerConfig, SpeculationConfig
from eesd_dist.control.chain_rule import REFUSAL, LogOdds, follow, of_length
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import (
    build_draft_engine,
    build_draft_shard,
    build_local_engine,
    load_draft_weights,
    load_verify_weights,
)
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.drafting.ranks import DraftShard
from eesd_dist.engine.layout import layout_of
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.model.span import LlamaSpan
from eesd_dist.page_table import PageTable
from eesd_dist.sampling.row_filters import filter_of
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import draft_choice
from eesd_dist.text.grammars import regular_expression
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import (
    ChoiceParams,
    DrafterUse,
    Outcome,
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from tests.support.json_codec import json_grammars
from tests.support.stepwise_cpu import stepwise_rounds
from tests.unit.engine.conftest import MakeConfig


@pytest.fixture(scope="module", autouse=True)
def _one_kind_of_arguments() -> Iterator[None]:
    """A kernel is compiled ahead for the types of one call: a call with others would compile for
    seconds in a round."""
    yield
    for kernel in (draft_kernels.draft_kernel(), verify_kernels.verify_kernel()):
        kinds = [signature[0] for signature in kernel.signatures]  # type: ignore[attr-defined]  # Numba's
        assert len(kinds) == len(set(kinds)), "more than one for a type of weights"


PAGES = PageTable((4, 2, 9))
KNOWN = list(range(5, 18))
TOKEN, AT, SEED = 40, len(KNOWN), 3
COST = CostModel(
    draft_step_s=0.05, verify_s=tuple(1.0 + 0.05 * i for i in range(6)), round_s=0.1, guess_s=0.03
)
CALIBRATED = of_length(5)._replace(
    prices=np.array([0.0, 0.3, 0.6, 0.9, 1.2, 1.5]),
    mean=0.6,
    hopeful=0.8,
    looks=True,
    odds=LogOdds(-1.0, -0.1, 1.0, 0.1, np.array([[0.1, 0.2], [0.6, 0.5], [0.9, 0.95]])),
)


@dataclasses.dataclass(kw_only=True)
class Chain:
    hidden_TD: torch.Tensor
    tokens: list[int]
    gaps: list[float]


def shard_with_prompt(config: EngineConfig, *, num_read: int) -> tuple[DraftShard, RowSlice | None]:
    """Returns a draft stage after a prompt, and the rows of it that its head has not read."""
    shard = build_draft_shard(config, layout_of(config), SingleGroup())
    with torch.inference_mode():
        prompt_TD = shard.run_layers(KNOWN, [RowSegment(0, AT, PAGES)])
        shard.run_head(prompt_TD[:num_read], [RowSegment(0, num_read, PAGES)])
    return shard, RowSlice(prompt_TD, num_read, AT) if num_read < AT else None


def rule_at(position: int, temperature: float, **filters: Any) -> RowRule:
    sampling = SamplingParams(temperature=temperature, seed=SEED, **filters)
    return RowRule.of(sampling, position=position, num_prompt=AT)


@torch.inference_mode()
def by_steps(
    config: EngineConfig, length: int, temperature: float, *, num_read: int, **filters: Any
) -> Chain:
    shard, lagging = shard_with_prompt(config, num_read=num_read)
    assert shard.head is not None
    rows, tokens, gaps, token = [], [], [], TOKEN
    unread = [] if lagging is None else [lagging.tensor]
    for step in range(length + 1):
        at = AT + step
        hidden_1D = shard.run_layers([token], [RowSegment(at, 1, PAGES)])
        rows.append(hidden_1D.clone())
        unread.append(hidden_1D.clone())
        if step == length:
            break
        input_ME = torch.cat(unread)
        first = at + 1 - len(input_ME)
        exit_MD = shard.run_head(input_ME, [RowSegment(first, len(input_ME), PAGES)])
        choice = draft_choice(
            shard.logits(exit_MD[-1:]),
            [rule_at(at + 1, temperature, **filters)],
            vocab_ids=shard.head.vocab_ids,
        )
        token, unread = int(choice.tokens[0, 0]), []
        tokens.append(token)
        gaps.append(float(choice.gaps[0]))
    return Chain(hidden_TD=torch.cat(rows), tokens=tokens, gaps=gaps)


def start(max_draft: int, temperature: float, **changes: object) -> ChainStart:
    chain = ChainStart(
        tokens=[TOKEN],
        segment=RowSegment(AT, 1, PAGES),
        max_draft=max_draft,
        rule=of_length(max_draft),
        temperature=temperature,
        seed=SEED,
    )
    return chain._replace(**changes)


def chain_calls(
    config: EngineConfig, length: int, temperature: float, *, num_read: int, **filters: Any
) -> Chain:
    shard, lagging = shard_with_prompt(config, num_read=num_read)
    assert shard.drafter is not None
    unread = () if lagging is None else (lagging,)
    row_filter = filter_of(ChoiceParams(temperature=temperature, **filters))
    chains = [start(length, temperature, lagging=unread, filters=row_filter)]
    hidden_TD, (chain,) = shard.drafter.draft(chains)
    assert chain.report.num_drafted == len(chain.tokens) == length
    assert torch.equal(chain.rows_TD.tensor, hidden_TD)
    return Chain(hidden_TD=hidden_TD, tokens=chain.tokens, gaps=chain.gaps)


def assert_equal(actual: Chain, expected: Chain) -> None:
    assert actual.tokens == expected.tokens
    assert actual.gaps == expected.gaps
    assert torch.equal(actual.hidden_TD, expected.hidden_TD)


@pytest.mark.parametrize("num_read", [AT, 9])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("head", ["sometimes", "truncated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chain_is_what_its_steps_draft(
    dtype: DType, head: str, temperature: float, num_read: int, make_config: MakeConfig
) -> None:
    config = make_config(head, dtype=dtype)
    for length in (0, 1, 6):
        expected = by_steps(config, length, temperature, num_read=num_read)
        assert_equal(chain_calls(config, length, temperature, num_read=num_read), expected)


@pytest.mark.parametrize("head", ["sometimes", "truncated"])
@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_p": 0.3}, {"top_k": 7, "top_p": 0.6, "min_p": 0.02}]
)
def test_a_filtered_chain_is_what_its_steps_draft(
    filters: dict[str, float], head: str, make_config: MakeConfig
) -> None:
    config = make_config(head)
    expected = by_steps(config, 5, 1.4, num_read=9, **filters)
    assert_equal(chain_calls(config, 5, 1.4, num_read=9, **filters), expected)
    assert expected.tokens != by_steps(config, 5, 1.4, num_read=9).tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_no_bit_of_a_chain(
    dtype: DType, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(dtype=dtype)
    expected = chain_calls(config, 5, 0.8, num_read=9)
    monkeypatch.setattr(calls, "_WORTH_A_THREAD", 1)
    for num_threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        assert_equal(chain_calls(config, 5, 0.8, num_read=9), expected)


def test_tokens_that_are_given_get_the_rows_of_tokens_that_were_drafted(
    make_config: MakeConfig,
) -> None:
    config = make_config()
    drafted = chain_calls(config, 5, 0.8, num_read=AT)
    shard, _ = shard_with_prompt(config, num_read=AT)
    assert shard.drafter is not None
    tokens = [TOKEN, *drafted.tokens]
    segment = RowSegment(AT, len(tokens), PAGES)
    hidden_TD, (chain,) = shard.drafter.draft([start(0, 0.8, tokens=tokens, segment=segment)])
    assert torch.equal(hidden_TD, drafted.hidden_TD)
    assert chain.report.means == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("head", ["sometimes", "truncated"])
def test_a_masked_guess_is_that_of_the_rule(
    head: str, temperature: float, make_config: MakeConfig
) -> None:
    """Once among all tokens, among some, among one, and among those that the head has not."""
    shard, lagging = shard_with_prompt(make_config(head), num_read=13)
    assert shard.drafter is not None
    assert shard.head is not None
    assert lagging is None
    free = shard.drafter.draft([start(1, temperature)])[1][0]
    outside = range(1, 96, 2) if head == "truncated" else []
    for allowed in (range(96), [4, 50, 52, 94], [50], outside):
        mask = sum(1 << token for token in allowed).to_bytes(12, "little")
        shard, _ = shard_with_prompt(make_config(head), num_read=13)
        assert shard.drafter is not None
        masked = start(1, temperature, rule=REFUSAL, mask=mask)
        rows_TD, chains = shard.drafter.draft([masked, start(0, temperature)])
        (token,), (gap,) = chains[0].tokens, chains[0].gaps
        if not list(allowed):
            assert token == -1
            continue
        with torch.inference_mode():
            shard, _ = shard_with_prompt(make_config(head), num_read=13)
            assert shard.head is not None
            exit_MD = shard.run_head(rows_TD[:1], [RowSegment(AT, 1, PAGES)])
            rule = msgspec.structs.replace(rule_at(AT + 1, temperature), mask=mask)
            choice = draft_choice(shard.logits(exit_MD), [rule], vocab_ids=shard.head.vocab_ids)
        if bool(choice.scores[0, 0] == -torch.inf):
            assert token == -1
            continue
        assert (token, gap) == (int(choice.tokens[0, 0]), float(choice.gaps[0]))
        assert token in allowed
        assert len(list(allowed)) < 96 or (token, gap) == (free.tokens[0], free.gaps[0])


def test_a_guess_that_is_not_taken_is_told(make_config: MakeConfig) -> None:
    shard, _ = shard_with_prompt(make_config(), num_read=AT)
    assert shard.drafter is not None
    hidden_TD, (chain,) = shard.drafter.draft([start(1, 0.0, rule=REFUSAL)])
    assert chain.report.num_drafted == 0
    assert len(chain.report.means) == len(chain.tokens) == 1
    assert len(hidden_TD) == 1


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_draft_together_what_each_drafts_alone(
    dtype: DType, num_threads: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in one piece and in parts, lookups, refusals, drafts of every length."""
    config = make_config(dtype=dtype)
    rng = random.Random(num_threads)
    rules = [of_length(0), of_length(1), of_length(3), REFUSAL, of_length(5), CALIBRATED]
    chains = [
        ChainStart(
            tokens=[rng.randrange(3, 96) for _ in range(rng.choice([1, 1, 4, 9]))],
            segment=RowSegment(0, 0, PageTable((2 * number, 2 * number + 1))),
            max_draft=0 if number == 7 else 5,
            rule=rules[number % len(rules)],
            temperature=rng.choice([0.0, 0.8]),
            seed=number,
        )
        for number in range(9)
    ]
    single_shard, batch_shard = (
        build_draft_shard(config, layout_of(config), SingleGroup()) for _ in range(2)
    )
    assert single_shard.drafter is not None
    assert batch_shard.drafter is not None
    expected: list[DraftedChain] = []
    starts: list[ChainStart] = []
    for number, chain in enumerate(chains):
        num_before = number % 3 * 4
        pages, lagging = chain.segment.pages, ()
        for shard in (single_shard, batch_shard):
            if num_before:
                before = RowSegment(0, num_before, pages)
                prompt_TD = shard.run_layers(range(5, 5 + num_before), [before])
                lagging = (RowSlice(prompt_TD, 2, num_before),)
                shard.run_head(prompt_TD[:2], [RowSegment(0, 2, pages)])
        segment = RowSegment(num_before, len(chain.tokens), pages)
        starts.append(chain._replace(segment=segment, lagging=lagging))
        expected.append(single_shard.drafter.draft([starts[-1]])[1][0])
    monkeypatch.setattr(calls, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    hidden_TD, drafted = batch_shard.drafter.draft(starts)
    assert torch.equal(hidden_TD, torch.cat([chain.rows_TD.tensor for chain in expected]))
    for batch_chain, before_it in zip(drafted, expected, strict=True):
        assert torch.equal(batch_chain.rows_TD.tensor, before_it.rows_TD.tensor)
        assert batch_chain[1:] == before_it[1:]
    for chain, before_it in zip(starts, expected, strict=True):
        gaps = [*before_it.gaps, *[0.0] * (chain.max_draft - len(before_it.gaps))]
        assert follow(chain.rule, gaps if chain.max_draft else ()) == before_it.report
    assert {chain.report.num_drafted for chain in drafted} >= {0, 1, 3, 5}


def test_where_products_are_not_compiled_there_is_no_compiled_chain(
    make_config: MakeConfig,
) -> None:
    config = make_config(dtype="float16")
    shard = build_draft_shard(config, layout_of(config), SingleGroup())
    assert shard.drafter is None


def serve(
    engine: EngineCore, requests: Sequence[Request], rounds: list[RoundStats] | None = None
) -> tuple[dict[RequestId, list[TokenId]], list[Outcome]]:
    """Serves all requests; returns their texts and the outcomes of all rounds. `rounds`: where to
    add their statistics."""
    texts: dict[RequestId, list[TokenId]] = {request.request_id: [] for request in requests}
    outcomes: list[Outcome] = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        result = engine.step(wait_s=0.0)
        for emission in result.emissions:
            texts[emission.request_id] += emission.tokens
        outcomes += result.outcomes
        if rounds is not None:
            rounds += result.rounds
    return texts, outcomes


def one_by_one(
    engine: EngineCore, temperature: float, **speculation: object
) -> tuple[list[TokenId], list[Outcome]]:
    rng = random.Random(11)
    tokens: list[TokenId] = []
    outcomes: list[Outcome] = []
    for number in range(5):
        phrase = [TokenId(rng.randrange(3, 96)) for _ in range(rng.randrange(3, 9))]
        request = Request(
            request_id=RequestId(f"{number}"),
            prompt=tuple(phrase * 3),
            sampling=SamplingParams(temperature=temperature, max_tokens=40, seed=number),
            speculation=SpeculationParams(**speculation),  # type: ignore[arg-type]
        )
        texts, judged = serve(engine, [request])
        tokens += texts[request.request_id]
        outcomes += judged
    return tokens, outcomes


def engine_of(config: EngineConfig) -> EngineCore:
    return build_local_engine(config, cost=COST, grammars=json_grammars())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("head", ["sometimes", "calibrated"])
@pytest.mark.parametrize("controller", ["goodput", "fixed", "smartspec", "beta", "calibration"])
def test_rounds_draft_and_decide_as_they_do_step_by_step(
    controller: str,
    head: str,
    temperature: float,
    make_config: MakeConfig,
) -> None:
    speculation = SpeculationConfig(
        max_draft_tokens=5, controller=controller, learn_costs=False, seed=8
    )
    config = make_config(head, speculation=speculation)
    engine = engine_of(config)
    assert engine.draft_stage.drafter is not None
    tokens, outcomes = one_by_one(engine, temperature)
    with stepwise_rounds():
        stepwise = engine_of(config)
    assert stepwise.draft_stage.drafter is None
    expected, expected_outcomes = one_by_one(stepwise, temperature)
    assert tokens == expected
    assert outcomes == expected_outcomes
    assert sum(outcome.num_accepted for outcome in outcomes) > 20
    assert any(outcome.is_lookup for outcome in outcomes) == (controller == "goodput")
    assert tokens == one_by_one(stepwise, temperature, mode="off")[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounds_of_several_requests_are_drafted_in_one_call_and_change_no_text(
    dtype: DType, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in parts, prompt lookup, wide filters, two controllers in one batch."""
    config = make_config(
        "calibrated",
        dtype=dtype,
        scheduler=SchedulerConfig(prefill_chunk=7),
        speculation=SpeculationConfig(max_draft_tokens=5, learn_costs=False, seed=8),
    )
    engine = engine_of(config)
    drafted: list[int] = []
    draft = RoundDrafter.draft

    def noted(drafter: RoundDrafter, chains: Sequence[ChainStart]) -> object:
        drafted.append(sum(chain.max_draft > 0 for chain in chains))
        return draft(drafter, chains)

    monkeypatch.setattr(RoundDrafter, "draft", noted)
    texts: dict[str, list[dict[RequestId, list[TokenId]]]] = {"auto": [], "off": []}
    outcomes: list[Outcome] = []
    for mode, runs in texts.items():
        for request in _a_batch(mode):
            engine.add(request)
        written: dict[RequestId, list[TokenId]] = {}
        while engine.has_work:
            result = engine.step(wait_s=0.0)
            outcomes += result.outcomes
            for emission in result.emissions:
                written.setdefault(emission.request_id, []).extend(emission.tokens)
        runs.append(written)
    assert texts["auto"] == texts["off"]
    assert max(drafted) > 4
    assert sum(outcome.num_accepted for outcome in outcomes) > 50
    assert any(outcome.is_lookup for outcome in outcomes)


def _a_batch(mode: str) -> list[Request]:
    rng = random.Random(4)
    return [
        Request(
            request_id=RequestId(f"{number}"),
            prompt=tuple([TokenId(rng.randrange(3, 96)) for _ in range(2 + number)] * 3),
            sampling=SamplingParams(
                temperature=(0.0, 0.7, 1.0)[number % 3],
                top_p=(1.0, 0.95)[number % 2],
                max_tokens=20 + number,
                seed=number,
            ),
            speculation=SpeculationParams(
                mode=mode,  # type: ignore[arg-type]
                controller="fixed" if number == 5 else None,
            ),
        )
        for number in range(8)
    ]


@pytest.mark.parametrize("controller", ["fixed", "goodput"])
@pytest.mark.parametrize("with_grammars", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batches_are_verified_as_they_are_step_by_step(
    dtype: DType,
    with_grammars: bool,
    controller: str,
    make_config: MakeConfig,
) -> None:
    """Chains, trees and prefill chunks, greedy, with noise and filtered, in one batch. In advance,
    `goodput` may decide otherwise than level by level."""
    pattern = regular_expression("([a-z]{1,3}[,.] ?){3,9}")
    config = make_config(
        dtype=dtype,
        scheduler=SchedulerConfig(prefill_chunk=7),
        speculation=SpeculationConfig(max_draft_tokens=5, learn_costs=False, seed=8),
    )
    requests = [
        Request(
            request_id=RequestId(f"{number}"),
            prompt=tuple(TokenId(3 + (number * 7 + i) % 90) for i in range(4 + 5 * number)),
            sampling=SamplingParams(
                temperature=(0.0, 0.7, 1.2)[number % 3],
                max_tokens=20 + number,
                seed=number,
                stop_token_ids=(2,),
                grammar=pattern if with_grammars and number % 3 else None,
            ),
            speculation=SpeculationParams(
                controller=controller, tree="static" if number % 4 == 3 else "none"
            ),
        )
        for number in range(7)
    ]
    texts, outcomes = serve(engine_of(config), requests)
    with stepwise_rounds():
        stepwise = engine_of(config)
    texts_by_steps, outcomes_by_steps = serve(stepwise, requests)
    assert texts == texts_by_steps
    if controller == "fixed":
        assert outcomes == outcomes_by_steps


def test_a_grammar_and_a_tree_leave_the_others_their_one_call(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        speculation=SpeculationConfig(max_draft_tokens=5, learn_costs=False, prompt_lookup=False)
    )
    pattern = regular_expression("([a-z]{1,3}[,.] ?){3,9}")
    odd = {
        0: SamplingParams(max_tokens=24, grammar=pattern, stop_token_ids=(2,)),
        1: SamplingParams(max_tokens=24, repetition_penalty=1.3, temperature=0.8, top_p=0.5),
    }
    requests = [
        Request(
            request_id=RequestId(f"{number}"),
            prompt=tuple(TokenId(3 + (number * 7 + i) % 90) for i in range(6)),
            sampling=odd.get(number, SamplingParams(max_tokens=24)),
            speculation=SpeculationParams(
                controller="fixed", tree="static" if number == 2 else "none"
            ),
        )
        for number in range(6)
    ]
    lengths: list[list[int]] = []
    draft = RoundDrafter.draft

    def noted(drafter: RoundDrafter, chains: Sequence[ChainStart]) -> object:
        lengths.append([chain.max_draft for chain in chains])
        return draft(drafter, chains)

    monkeypatch.setattr(RoundDrafter, "draft", noted)
    rounds: list[RoundStats] = []
    batch_texts, _ = serve(engine_of(config), requests, rounds)
    uses: Counter[DrafterUse] = Counter()
    for stats in rounds:
        uses.update(dict(stats.drafters))
    by_level = {use.reason for use in uses if use.drafter == "levels"}
    assert by_level == {"grammar", "tree"}
    assert uses[DrafterUse("compiled", "")] > 15
    chain_calls = [chains for chains in lengths if max(chains, default=0) > 1]
    assert sum(map(len, chain_calls)) > 3 * len(chain_calls)  # four of six, to the end
    assert max(map(len, chain_calls)) == 4
    for request in requests:
        texts, _ = serve(engine_of(config), [request])
        assert texts[request.request_id] == batch_texts[request.request_id]


def test_work_goes_on_while_the_calls_are_compiled(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(speculation=SpeculationConfig(max_draft_tokens=5))
    layout, group = layout_of(config), SingleGroup()
    draft, remaining = load_draft_weights(config, layout, group), load_verify_weights(config, group)
    may_compile = Event()

    def slowly(function: Callable[..., object]) -> Callable[..., object]:
        def of(*args: object, **options: object) -> object:
            may_compile.wait()
            return function(*args, **options)

        return of

    monkeypatch.setattr(lazy, "STARTING_S", 0.01)
    monkeypatch.setattr(RoundDrafter, "of", slowly(RoundDrafter.of))
    monkeypatch.setattr(Verifier, "of", slowly(Verifier.of))
    monkeypatch.setattr(draft_kernels, "is_draft_cached", lambda: False)
    monkeypatch.setattr(verify_kernels, "is_verify_cached", lambda: False)
    stage = remaining.stage(num_pages=64, compiles_in_background=True)
    shard = draft.shard(num_pages=64, compiles_in_background=True)
    engine = build_draft_engine(config, MemoryChannel(stage.verify), cost=COST, shard=shard)
    before, _ = one_by_one(engine, 0.8)
    assert shard.drafter is None
    may_compile.set()
    began = time.monotonic()
    while shard.drafter is None or stage.verifier is None:
        assert time.monotonic() < began + 60.0
        time.sleep(0.01)
    assert one_by_one(engine, 0.8)[0] == before
    assert one_by_one(engine, 0.8, mode="off")[0] == before


def test_a_call_that_cannot_be_compiled_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_started = Event()

    def fail() -> int:
        compile_started.set()
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(lazy, "STARTING_S", 0.01)
    missing = LazyCompiled(fail)
    assert not compile_started.wait(0.1)  # nothing has asked for it
    assert missing.get() is None
    assert compile_started.wait(30.0)
    began = time.monotonic()
    while "no such instruction" not in caplog.text:
        assert time.monotonic() < began + 30.0
        time.sleep(0.01)
    assert missing.get() is None


FULL_RULES: Sequence[dict[str, object]] = (
    {"top_p": 0.8},
    {"top_k": 5, "min_p": 0.1},
    {"logit_bias": ((7, 2.0),)},
    {"top_logprobs": 2},
    {"min_tokens": 9},
    {"repetition_penalty": 1.3, "top_p": 0.9, "top_logprobs": 0},
    {"frequency_penalty": 0.5, "temperature": 0.0, "top_logprobs": 4},
    {},
)


@pytest.mark.parametrize("with_grammars", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_pass_of_rows_with_any_rule_is_one_call(
    with_grammars: bool,
    num_threads: int,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts and log-probabilities of a batch are those of the rule over a pass step by step."""
    monkeypatch.setattr(calls, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    pattern = regular_expression("([a-z]{1,3}[,.] ?){3,9}")
    requests = [
        Request(
            request_id=RequestId(f"{number}"),
            prompt=tuple(TokenId(token) for token in KNOWN),
            sampling=structs.replace(
                SamplingParams(temperature=0.9, max_tokens=20, seed=5, stop_token_ids=(2, 40, 60)),
                grammar=pattern if with_grammars and number % 2 else None,
                **changes,  # type: ignore[arg-type]
            ),
            speculation=SpeculationParams(controller="fixed", max_draft_tokens=3),
        )
        for number, changes in enumerate(FULL_RULES)
    ]

    def served(engine: EngineCore) -> dict[RequestId, list[object]]:
        emitted: dict[RequestId, list[object]] = {}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for emission in engine.step(wait_s=0.0).emissions:
                emitted.setdefault(emission.request_id, []).extend(
                    zip(emission.tokens, emission.logprobs or emission.tokens, strict=True)
                )
        return emitted

    engine = engine_of(make_config())
    with monkeypatch.context() as patched:
        patched.setattr(LlamaSpan, "forward", None)
        emitted = served(engine)
    with stepwise_rounds():
        assert served(engine_of(make_config())) == emitted
    assert len({str(tokens) for tokens in emitted.values()}) > 4
