"""Draft trees on the real engine: more tokens per round, and never another token."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from msgspec import structs
from torch import Tensor

from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    Numerics,
    SchedulerConfig,
    SpeculationConfig,
    TreeConfig,
)
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import build_draft_engine, build_verify_stage
from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.errors import RequestError
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import (
    Emission,
    KvCacheDType,
    Outcome,
    Request,
    RequestId,
    RoundStats,
    SpeculationParams,
    TokenId,
    TokenLogprobs,
    TreeShape,
)
from tests.support.drafters import Agreement, save_head, save_target
from tests.support.thread_ranks import on_ranks
from tests.unit.engine.test_exactness import SAMPLING, requests

COST = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.02), round_s=0.05)
"""No measurement, and long drafts."""
SHAPES: tuple[TreeShape, ...] = ("static", "dynamic")
TREE = TreeConfig(widths=(3, 2, 2, 1), branch=3, max_nodes=14)

Verify = Callable[[RoundHeader, Tensor, Tensor | None], VerifyReply]
Make = Callable[..., EngineConfig]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Writes targets and heads, by name. In "deep" the later layers change the result, and so does
    the content of their pages; in "flat" they add nothing."""
    folder = tmp_path_factory.mktemp("trees")
    flat, deep = save_target(folder / "flat"), save_target(folder / "deep", tail_scale=0.35)
    agreements: tuple[Agreement, ...] = ("always", "sometimes", "never")
    heads = {name: (flat, save_head(flat, folder / name, name)) for name in agreements}
    return heads | {"deep": (deep, save_head(deep, folder / "head", "always"))}


@pytest.fixture(scope="module")
def make(targets: dict[str, tuple[Path, Path]]) -> Make:
    def config(
        name: str = "deep",
        *,
        dtype: DType = "float32",
        numerics: Numerics = "invariant",
        page_size: int = 4,
        num_pages: int = 200,
        max_running: int = 16,
        overlap: bool = False,
        prefix_caching: bool = True,
        kv_cache_dtype: KvCacheDType = "auto",
        speculation: SpeculationConfig | None = None,
    ) -> EngineConfig:
        target, head = targets[name]
        return EngineConfig(
            model=ModelConfig(path=target, head=head, dtype=dtype, numerics=numerics),
            cache=CacheConfig(
                num_pages=num_pages,
                page_size=page_size,
                prefix_caching=prefix_caching,
                kv_cache_dtype=kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(prefill_chunk=24, max_running=max_running, overlap=overlap),
            speculation=speculation
            or SpeculationConfig(max_draft_tokens=5, fixed_length=4, tree=TREE),
        )

    return config


def engine_of(config: EngineConfig, verify: Verify | None = None) -> EngineCore:
    verify = verify or build_verify_stage(config, SingleGroup()).verify
    return build_draft_engine(config, MemoryChannel(verify), cost=COST)


@dataclasses.dataclass
class ServedOutputs:
    """All outputs of an engine."""

    tokens: dict[RequestId, list[TokenId]] = dataclasses.field(default_factory=dict)
    logprobs: dict[RequestId, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    emissions: list[Emission] = dataclasses.field(default_factory=list)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    rounds: list[RoundStats] = dataclasses.field(default_factory=list)

    def take(self, result: StepResult) -> None:
        for emission in result.emissions:
            self.tokens.setdefault(emission.request_id, []).extend(emission.tokens)
            self.logprobs.setdefault(emission.request_id, []).extend(emission.logprobs)
        self.emissions += result.emissions
        self.outcomes += result.outcomes
        self.rounds += result.rounds

    def in_order(self, batch: list[Request]) -> list[list[TokenId]]:
        return [self.tokens[request.request_id] for request in batch]


def run(engine: EngineCore, batch: list[Request]) -> ServedOutputs:
    outputs = ServedOutputs()
    for request in batch:
        engine.add(request)
    while engine.has_work:
        outputs.take(engine.step(wait_s=0.0))
    return outputs


PLAIN = SpeculationParams(mode="off")


def tree(shape: TreeShape, controller: str = "fixed") -> SpeculationParams:
    return SpeculationParams(tree=shape, controller=controller)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAMPLING)
def test_no_tree_changes_a_token_or_its_probability(name: str, dtype: DType, make: Make) -> None:
    engine = engine_of(make(dtype=dtype))
    plain_batch = requests(4, SAMPLING[name], PLAIN, "plain")
    plain = run(engine, plain_batch)
    for shape in SHAPES:
        batch = requests(4, SAMPLING[name], tree(shape), shape)
        outputs = run(engine, batch)
        assert outputs.in_order(batch) == plain.in_order(plain_batch), shape
        for ours, theirs in zip(batch, plain_batch, strict=True):
            assert outputs.logprobs[ours.request_id] == plain.logprobs[theirs.request_id], shape
        assert sum(e.num_drafted for e in outputs.emissions) > 20


@pytest.mark.parametrize("head", ["always", "sometimes", "never"])
def test_no_drafter_of_trees_changes_a_token(head: str, make: Make) -> None:
    engine = engine_of(make(head))
    for name in ("greedy", "penalised"):
        plain_batch = requests(2, SAMPLING[name], PLAIN, f"p-{name}")
        expected = run(engine, plain_batch).in_order(plain_batch)
        for shape in SHAPES:
            batch = requests(2, SAMPLING[name], tree(shape), f"{shape}-{name}")
            assert run(engine, batch).in_order(batch) == expected, (name, shape)


@pytest.mark.parametrize("count", [1, 4, 16])
def test_trees_chains_and_plain_requests_share_their_rounds(count: int, make: Make) -> None:
    engine = engine_of(make(num_pages=400))
    plain_batch = requests(count, SAMPLING["penalised"], PLAIN, "plain")
    expected = run(engine, plain_batch).in_order(plain_batch)
    kinds = [
        tree("dynamic"),
        tree("static", "calibration"),
        SpeculationParams(controller="fixed"),
        tree("dynamic", "goodput"),
        tree("static", "smartspec"),
        PLAIN,
        tree("static", "beta"),
    ]
    batch = [
        dataclasses.replace(request, speculation=kinds[i % len(kinds)])
        for i, request in enumerate(requests(count, SAMPLING["penalised"], PLAIN, "mixed"))
    ]
    assert run(engine, batch).in_order(batch) == expected


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_no_page_size_upsets_a_tree(page_size: int, make: Make) -> None:
    config = make(page_size=page_size, num_pages=600 // page_size)
    engine = engine_of(config)
    for name in ("greedy", "warm"):
        plain_batch = requests(2, SAMPLING[name], PLAIN, f"p-{name}")
        expected = run(engine, plain_batch).in_order(plain_batch)
        for shape in SHAPES:
            batch = requests(2, SAMPLING[name], tree(shape), f"{shape}-{name}")
            assert run(engine, batch).in_order(batch) == expected, (name, shape)


def test_trees_in_few_pages_cost_time_only(make: Make) -> None:
    plain_batch = requests(6, SAMPLING["warm"], PLAIN, "roomy")
    expected = run(engine_of(make()), plain_batch).in_order(plain_batch)
    for shape in SHAPES:
        for caching in (True, False):
            cramped = engine_of(make(num_pages=34, max_running=8, prefix_caching=caching))
            batch = requests(6, SAMPLING["warm"], tree(shape), shape)
            assert run(cramped, batch).in_order(batch) == expected
            assert cramped._scheduler.usage().num_preemptions > 0
            cramped._scheduler.check()
            assert cramped.load().free_pages == cramped.load().num_pages


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefix_that_a_tree_has_left_in_the_cache_is_the_text(
    shape: TreeShape, make: Make
) -> None:
    engine, reference = engine_of(make()), engine_of(make())
    batch = requests(5, SAMPLING["warm"], tree(shape), "first")
    outputs = run(engine, batch)
    assert any(branch.chosen_rank > 0 for o in outputs.outcomes for branch in o.branches)
    longer = [
        dataclasses.replace(
            request,
            request_id=RequestId(f"{request.request_id}-again"),
            prompt=(*request.prompt, *outputs.tokens[request.request_id]),
        )
        for request in batch
    ]
    rerun = run(engine, longer)
    for emission in rerun.emissions[: len(longer)]:
        assert emission.num_cached_prompt_tokens > 20
    plain = [dataclasses.replace(request, speculation=PLAIN) for request in longer]
    assert rerun.in_order(longer) == run(reference, plain).in_order(plain)


def test_two_microbatches_of_trees_overlap_and_change_no_token(make: Make) -> None:
    engine = engine_of(make(overlap=True))
    for name in ("greedy", "penalised"):
        plain_batch = requests(5, SAMPLING[name], PLAIN, f"p-{name}")
        expected = run(engine, plain_batch).in_order(plain_batch)
        for shape in SHAPES:
            batch = requests(5, SAMPLING[name], tree(shape, "calibration"), f"{shape}-{name}")
            batch[2] = dataclasses.replace(batch[2], speculation=SpeculationParams())
            outputs = run(engine, batch)
            assert outputs.in_order(batch) == expected, (name, shape)
    (single,) = requests(1, SAMPLING["greedy"], tree("dynamic"), "alone")
    (plain,) = requests(1, SAMPLING["greedy"], PLAIN, "plain")
    assert run(engine, [single]).in_order([single]) == run(engine, [plain]).in_order([plain])


def test_requests_that_come_and_go_leave_no_move_behind(make: Make) -> None:
    """Moves wait for the next header of any request, also after their own request has ended."""
    config = make(num_pages=40, max_running=3, overlap=True)
    engine = engine_of(config)
    sampling = structs.replace(SAMPLING["warm"], max_tokens=9)
    plain_batch = requests(14, sampling, PLAIN, "plain")
    plain = run(engine_of(make(num_pages=400)), plain_batch).in_order(plain_batch)
    rng = Random(2)
    batch = requests(14, sampling, tree("static"), "tree")
    outputs, waiting = ServedOutputs(), list(batch)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop(0))
        outputs.take(engine.step(wait_s=0.0))
    assert outputs.in_order(batch) == plain


def test_a_lost_verify_stage_voids_the_moves_it_was_to_make(make: Make) -> None:
    config = make()
    stages: list[VerifyStage] = []

    def fresh() -> MemoryChannel:
        stages.append(build_verify_stage(config, SingleGroup()))
        return MemoryChannel(stages[-1].verify)

    engine = build_draft_engine(config, fresh(), cost=COST)
    plain_batch = requests(3, SAMPLING["warm"], PLAIN, "plain")
    expected = run(engine_of(config), plain_batch).in_order(plain_batch)
    batch = requests(3, SAMPLING["warm"], tree("static"), "lost")
    outputs, turns, with_moves = ServedOutputs(), 0, 0
    for request in batch:
        engine.add(request)
    while engine.has_work:
        turns += 1
        if turns in (4, 5, 7):
            with_moves += bool(engine._headers._moves._pending)
            engine.attach(fresh(), epoch=turns)
            assert not engine._headers._moves._pending
        outputs.take(engine.step(wait_s=0.0))
    assert outputs.in_order(batch) == expected
    assert len(stages) == 4


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_two_verify_ranks_keep_the_promise(make: Make, kv_cache_dtype: KvCacheDType) -> None:
    config = make(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    plain_batch = requests(4, SAMPLING["penalised"], PLAIN, "plain")
    stages = on_ranks(2, lambda group: build_verify_stage(config, group))

    def verify(header: RoundHeader, hidden_TD: Tensor, probs_KV: Tensor | None) -> VerifyReply:
        with ThreadPoolExecutor(2) as pool:  # the two ranks sum over their group
            replies = list(pool.map(lambda s: s.verify(header, hidden_TD, probs_KV), stages))
        assert replies[0].tokens.tolist() == replies[1].tokens.tolist()
        return replies[0]

    engine = engine_of(config, verify)
    expected = run(engine, plain_batch).in_order(plain_batch)
    for shape in ("none", *SHAPES):
        batch = requests(4, SAMPLING["penalised"], tree(shape), shape)
        assert run(engine, batch).in_order(batch) == expected, shape


def accepted_per_round(outputs: ServedOutputs) -> float:
    drafted = [outcome for outcome in outputs.outcomes if outcome.num_drafted]
    return sum(outcome.num_accepted for outcome in drafted) / len(drafted)


def accepted_share(outputs: ServedOutputs) -> float:
    drafted = sum(outcome.num_drafted for outcome in outputs.outcomes)
    return sum(outcome.num_accepted for outcome in outputs.outcomes) / drafted


@pytest.mark.parametrize("name", ["greedy", "warm"])
def test_a_tree_accepts_more_than_a_chain_as_deep(name: str, make: Make) -> None:
    speculation = SpeculationConfig(
        max_draft_tokens=3, fixed_length=3, tree=TreeConfig(widths=(2, 2, 2), branch=2)
    )
    engine = engine_of(make("sometimes", speculation=speculation))
    sampling = structs.replace(SAMPLING[name], max_tokens=32)
    chain, static, dynamic = (
        run(engine, requests(5, sampling, tree(shape), f"{shape}-{name}"))
        for shape in ("none", "static", "dynamic")
    )
    assert accepted_per_round(chain) > 0.2
    assert accepted_per_round(static) > 1.15 * accepted_per_round(chain)
    assert accepted_share(dynamic) > accepted_share(static), "it drafts where it expects to survive"


def test_a_drafter_that_always_agrees_has_every_level_accepted(make: Make) -> None:
    engine = engine_of(make("always"))
    outputs = run(engine, requests(3, SAMPLING["greedy"], tree("static"), "always"))
    full = [outcome for outcome in outputs.outcomes if len(outcome.branches) >= 3]
    assert len(full) > 5
    for outcome in full:
        assert outcome.num_first_accepted == outcome.num_accepted
        assert outcome.num_first_rejected == len(outcome.branches) - outcome.num_accepted == 0


def test_outcomes_tell_of_every_branch_that_was_judged(make: Make) -> None:
    engine = engine_of(make("sometimes"))
    outputs = run(engine, requests(6, SAMPLING["warm"], tree("static"), "branches"))
    drafted = [outcome for outcome in outputs.outcomes if outcome.num_drafted]
    seen_ranks = set()
    for outcome in drafted:
        assert outcome.num_drafted <= TREE.max_nodes
        assert not outcome.evidence
        ranks = [branch.chosen_rank for branch in outcome.branches]
        assert outcome.num_accepted == sum(rank >= 0 for rank in ranks)
        assert all(rank >= 0 for rank in ranks[:-1]), "a verdict goes on from what it chose"
        assert [branch.depth for branch in outcome.branches] == list(range(len(ranks)))
        assert outcome.num_first_accepted + outcome.num_first_rejected == len(ranks)
        for branch in outcome.branches:
            assert branch.num_offered <= TREE.width_at(branch.depth, "static")
            assert branch.evidence.depth == branch.depth
        seen_ranks |= set(ranks)
    assert {-1, 0, 1} <= seen_ranks
    chain = run(engine, requests(2, SAMPLING["warm"], tree("none"), "chains"))
    assert all(not outcome.branches for outcome in chain.outcomes)


def test_round_statistics_count_trees_by_depth(make: Make) -> None:
    engine = engine_of(make("sometimes"))
    outputs = run(engine, requests(5, SAMPLING["greedy"], tree("static"), "depths"))
    for stats in outputs.rounds:
        assert len(stats.drafted_by_position) <= 5
        assert list(stats.drafted_by_position) == sorted(stats.drafted_by_position, reverse=True)
        assert sum(stats.accepted_by_position) == stats.num_accepted
        assert sum(stats.drafted_by_position) <= stats.num_drafted
    assert any(sum(s.drafted_by_position) < s.num_drafted for s in outputs.rounds)


def test_a_tree_under_rejection_sampling_is_refused_and_says_why(make: Make) -> None:
    engine = engine_of(make(speculation=SpeculationConfig(acceptance="rejection")))
    (request,) = requests(1, SAMPLING["greedy"], tree("dynamic"), "refused")
    with pytest.raises(RequestError, match="judges chains"):
        engine.add(request)
    assert not engine.has_work
    with pytest.raises(ValueError, match="judges chains"):
        SpeculationConfig(acceptance="rejection", tree=TreeConfig(shape="static"))


def test_fast_numerics_take_trees_too(make: Make) -> None:
    engine = engine_of(make(numerics="fast"))
    torch.set_num_threads(1)
    plain_batch = requests(3, SAMPLING["greedy"], PLAIN, "plain")
    expected = run(engine, plain_batch).in_order(plain_batch)
    for shape in SHAPES:
        batch = requests(3, SAMPLING["greedy"], tree(shape), shape)
        texts = run(engine, batch).in_order(batch)
        same = sum(
            a == b for x, y in zip(texts, expected, strict=True) for a, b in zip(x, y, strict=False)
        )
        assert same > 0.9 * sum(map(len, expected)), (
            "no promise, and hardly a difference in float32"
        )
