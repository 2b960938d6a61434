"""A round drafted in steps, as on a GPU: kernels in Triton's interpreter, graphs as reruns."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from eesd_dist.backends.api import ChainStart, DraftedChain
from eesd_dist.backends.cuda import attention as cuda_attention
from eesd_dist.backends.cuda import graphs, steps, verifier
from eesd_dist.backends.cuda import layers as cuda_layers
from eesd_dist.backends.cuda.drafter import GraphDrafter
from eesd_dist.backends.cuda.layers import CudaLayers
from eesd_dist.backends.cuda.verifier import GraphVerifier
from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.backends.row_slices import RowSlice
from eesd_dist.config import EngineConfig, SpeculationConfig
from eesd_dist.control.chain_rule import REFUSAL, LogOdds, follow, of_length
from eesd_dist.control.cost import NOMINAL_COST
from eesd_dist.engine.build import build_draft_shard, build_local_engine
from eesd_dist.engine.drafting.ranks import DraftShard
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.model.layers.paged_layers import PagedLayers
from eesd_dist.page_table import PageTable
from eesd_dist.sampling.row_filters import NO_FILTER
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import WIDEST_GAP, draft_choice
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from tests.support.fake_cuda import as_on_gpu
from tests.support.recorded_graphs import NoRoom, recorded_graphs
from tests.unit.engine.conftest import MakeConfig

CALIBRATED = of_length(3)._replace(
    prices=np.array([0.0, 0.3, 0.6, 0.9]),
    mean=0.6,
    hopeful=0.8,
    looks=True,
    odds=LogOdds(-1.0, -0.1, 1.0, 0.1, np.array([[0.1, 0.2], [0.6, 0.5], [0.9, 0.95]])),
)

# What attention leaves in padding rows has no meaning, and may be any number.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, recorded_graphs():
        for module in (steps, verifier, cuda_layers):  # padding takes the interpreter time, too
            patch.setattr(module, "GRAPH_ROWS", (2, 4, 8, 16, 32))
        patch.setattr(cuda_layers, "GRAPH_TILES", (2, 4, 8, 16, 32))
        patch.setattr(cuda_attention, "checked_tiles", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def four_chains(make_config: MakeConfig) -> Sequence[DraftedChain]:
    """Returns what steps with graphs draft after `starts(num=4, seed=3)`."""
    shard, drafter = twin(make_config())
    with torch.inference_mode():
        return drafter.draft(starts(shard, num=4, seed=3))[1]


def on_gpu(paged: PagedLayers, *, hidden_size: int) -> None:
    """Makes the layers compute as on a GPU."""
    for pages in paged._pages:
        as_on_gpu(pages)
    paged.fused = CudaLayers(
        paged._layers,
        paged._pages,
        paged._rotations,
        hidden_size=hidden_size,
        dtype=paged.compute_dtype,
    )


def twin(config: EngineConfig) -> tuple[DraftShard, GraphDrafter]:
    shard = build_draft_shard(config, layout_of(config), SingleGroup())
    return shard, drafter_on_gpu(shard)


def drafter_on_gpu(shard: DraftShard) -> GraphDrafter:
    assert shard.head is not None
    for paged in (shard.span.paged, shard.head.paged):
        on_gpu(paged, hidden_size=shard.span.spec.hidden_size)
    drafter = GraphDrafter.of(shard.span, shard.head)
    assert drafter is not None
    return drafter


@torch.inference_mode()
def by_steps(shard: DraftShard, chain: ChainStart) -> DraftedChain:
    """Drafts a chain with a call of every part for each token."""
    assert shard.head is not None
    rows, tokens, gaps = [], [], []
    unread = [row_slice.tensor for row_slice in chain.lagging]
    newest, start, pages = list(chain.tokens), chain.segment.start, chain.segment.pages
    while True:
        hidden_TD = shard.run_layers(newest, [RowSegment(start, len(newest), pages)])
        rows.append(hidden_TD.clone())
        unread.append(hidden_TD.clone())
        start += len(newest)
        report = follow(chain.rule, gaps[: chain.max_draft])
        if report.num_drafted < len(gaps) or len(gaps) == chain.max_draft:
            break
        # The rule wants another guess if it would make one, whatever the guess is.
        if len(follow(chain.rule, [*gaps, 30.0]).means) == len(gaps):
            break
        input_ME = torch.cat(unread)
        read = RowSegment(start - len(input_ME), len(input_ME), pages)
        exit_MD = shard.run_head(input_ME, [read])
        top_k, top_p, _ = chain.filters
        sampling = SamplingParams(
            temperature=chain.temperature, seed=chain.seed, top_k=top_k, top_p=top_p
        )
        rule = RowRule.of(sampling, position=start, num_prompt=0)
        choice = draft_choice(shard.logits(exit_MD[-1:]), [rule], vocab_ids=shard.head.vocab_ids)
        tokens.append(int(choice.tokens[0, 0]))
        gaps.append(float(choice.gaps[0]))
        if follow(chain.rule, gaps).num_drafted < len(gaps):
            break
        newest, unread = tokens[-1:], []
    rows_TD = torch.cat(rows)
    return DraftedChain(RowSlice.all_of(rows_TD), tokens, gaps, follow(chain.rule, gaps))


def starts(shard: DraftShard, *, num: int, seed: int, max_draft: int = 3) -> list[ChainStart]:
    """Returns requests that have read some rows: prompts in parts, lookups, refusals, drafts of
    every length, with and without rows that the head has not read."""
    rng = random.Random(seed)
    rules = [of_length(0), of_length(1), REFUSAL, of_length(3), of_length(3), CALIBRATED]
    chains = []
    for number in range(num):
        pages, before = PageTable((2 * number, 2 * number + 1)), number % 3 * 3
        lagging: tuple[RowSlice, ...] = ()
        if before:
            with torch.inference_mode():
                segment = RowSegment(0, before, pages)
                hidden_TD = shard.run_layers(range(5, 5 + before), [segment])
                hidden_TD = hidden_TD.clone()
                num_read = before if number % 2 else 2
                shard.run_head(hidden_TD[:num_read], [RowSegment(0, num_read, pages)])
            lagging = (RowSlice(hidden_TD, num_read, before),) if num_read < before else ()
        tokens = [rng.randrange(3, 96) for _ in range(rng.choice([1, 1, 3]))]
        chains.append(
            ChainStart(
                tokens=tokens,
                segment=RowSegment(before, len(tokens), pages),
                max_draft=0 if number == 3 else max_draft,
                rule=rules[number % len(rules)],
                lagging=lagging,
                temperature=rng.choice([0.0, 0.8]),
                seed=number,
            )
        )
    return chains


def assert_same(actual: Sequence[DraftedChain], expected: Sequence[DraftedChain]) -> None:
    for chain, theirs in zip(actual, expected, strict=True):
        assert torch.equal(chain.rows_TD.tensor, theirs.rows_TD.tensor)
        assert chain[1:] == theirs[1:]


@pytest.mark.parametrize(
    ("head", "first", "lengths"), [("sometimes", 0, {0, 1, 3}), ("truncated", 4, {1, 3})]
)
def test_steps_draft_what_a_call_of_every_part_drafts(
    head: str, first: int, lengths: set[int], make_config: MakeConfig
) -> None:
    """The vocabulary of the head matters where it is asked: in the last chains."""
    config = make_config(head)
    shard, _ = twin(config)
    expected = [by_steps(shard, chain) for chain in starts(shard, num=6, seed=1)[first:]]
    shard, drafter = twin(config)
    chains = starts(shard, num=6, seed=1)[first:]
    with torch.inference_mode():
        for _ in range(2):  # the first step of a size has no graph yet
            hidden_TD, drafted = drafter.draft(chains)
            assert_same(drafted, expected)
    assert torch.equal(hidden_TD, torch.cat([chain.rows_TD.tensor for chain in expected]))
    assert {chain.report.num_drafted for chain in drafted} == lengths


def test_a_chain_alone_has_the_bits_of_one_in_a_batch(make_config: MakeConfig) -> None:
    shard, drafter = twin(make_config())
    chains = starts(shard, num=5, seed=2)
    with torch.inference_mode():
        _, expected = drafter.draft(chains)
        for chain, batch_chain in list(zip(chains, expected, strict=True))[3:]:
            _, single = drafter.draft([chain])
            assert_same(single, [batch_chain])


def test_filtered_guesses_are_those_of_the_rule(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to a greedy one, for which a filter means nothing, with graphs and without."""
    shard, _ = twin(make_config())

    def chains() -> list[ChainStart]:
        filters = NO_FILTER, (20, 0.9, -np.inf)
        return [
            chain._replace(temperature=1.5 if at else 0.0, filters=filters[at], rule=of_length(2))
            for at, chain in enumerate(starts(shard, num=2, seed=4))
        ]

    expected = [by_steps(shard, chain) for chain in chains()]
    for few_rows in (64, 0):
        monkeypatch.setattr(steps, "_FEW_ROWS", few_rows)
        shard, drafter = twin(make_config())
        with torch.inference_mode():
            drafted = drafter.draft(chains())[1]
        for chain, theirs in zip(drafted, expected, strict=True):
            assert torch.equal(chain.rows_TD.tensor, theirs.rows_TD.tensor)
            assert chain.tokens == theirs.tokens
            for gap, their_gap in zip(chain.gaps, theirs.gaps, strict=True):
                assert gap in {their_gap, WIDEST_GAP}  # the second best may be no candidate
    unfiltered = [chain._replace(filters=NO_FILTER) for chain in chains()]
    with torch.inference_mode():
        assert drafter.draft(unfiltered)[1][1].tokens != expected[1].tokens


def test_steps_without_a_graph_have_the_same_bits(
    make_config: MakeConfig,
    four_chains: Sequence[DraftedChain],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prompts that are too long for one, and a machine without room."""

    shard, drafter = twin(make_config())
    chains = starts(shard, num=4, seed=3)
    with torch.inference_mode():
        monkeypatch.setattr(steps, "_FEW_ROWS", 2)
        assert_same(drafter.draft(chains)[1], four_chains)
        monkeypatch.undo()
        monkeypatch.setattr(graphs, "Graph", NoRoom)
        shard, drafter = twin(make_config())
        chains = starts(shard, num=4, seed=3)
        assert_same(drafter.draft(chains)[1], four_chains)
    assert caplog.text.count("no_graphs drafting") == 1


def test_a_longer_plan_than_its_buffer_makes_new_graphs(
    make_config: MakeConfig,
    four_chains: Sequence[DraftedChain],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.inference_mode():
        monkeypatch.setattr(graphs, "_NUMBERS", 120)
        shard, drafter = twin(make_config())
        chains = starts(shard, num=4, seed=3)
        drafter.draft(chains[:1])
        before = dict(drafter._steps._graphs.by_key)
        assert_same(drafter.draft(chains)[1], four_chains)
        # A graph of before would read the old buffer; the twin of a graph here reads the new one.
        assert before
        assert not before.items() & drafter._steps._graphs.by_key.items()


def test_most_tokens_of_a_round_are_steps_with_one_graph(make_config: MakeConfig) -> None:
    shard, drafter = twin(make_config())
    (chain,) = starts(shard, num=1, seed=5)
    chain = chain._replace(tokens=[9], segment=RowSegment(0, 1, chain.segment.pages))
    with torch.inference_mode():
        drafter.draft([chain._replace(rule=of_length(3))])
    assert {(size.num_rows, size.reading.name) for size in drafter._steps._graphs.by_key} == {
        (2, "ITS_ROWS"),
        (2, "NOTHING"),
    }


ROW_RULES: Sequence[dict[str, object]] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 0.8, "repetition_penalty": 1.3, "top_k": 30, "top_logprobs": 2},
)


@pytest.mark.parametrize("controller", ["fixed", "goodput"])
def test_texts_are_those_of_plain_decoding(controller: str, make_config: MakeConfig) -> None:
    speculation = SpeculationConfig(
        controller=controller, fixed_length=2, max_draft_tokens=3, learn_costs=False
    )
    # The measured costs of an interpreter say nothing, and on a busy machine nothing is drafted.
    engine = build_local_engine(
        make_config("sometimes", speculation=speculation), cost=NOMINAL_COST
    )
    shard = engine.draft_stage._compute
    assert isinstance(shard, DraftShard)
    drafter = drafter_on_gpu(shard)
    shard._round_drafter = LazyCompiled(lambda: drafter, is_ready=True)
    channel = engine._channel
    assert isinstance(channel, MemoryChannel)
    stage = getattr(channel._verify, "__self__", None)
    assert isinstance(stage, VerifyStage)
    on_gpu(stage.span.paged, hidden_size=stage.span.spec.hidden_size)
    graphs = GraphVerifier.of(stage.span)
    assert graphs is not None
    stage._verifier = LazyCompiled(lambda: graphs, is_ready=True)
    texts: dict[str, list[TokenId]] = {}
    num_drafted = 0
    for mode in ("off", "auto"):
        for number, changes in enumerate(ROW_RULES):
            engine.add(
                Request(
                    request_id=RequestId(f"{mode}{number}"),
                    prompt=tuple(TokenId(5 + 3 * number + at) for at in range(4)),
                    sampling=SamplingParams(seed=number, max_tokens=6, **changes),  # type: ignore[arg-type]
                    speculation=SpeculationParams(mode=mode),
                )
            )
    while engine.has_work:
        result = engine.step(wait_s=0.0)
        for emission in result.emissions:
            texts.setdefault(emission.request_id, []).extend(emission.tokens)
        num_drafted += sum(outcome.num_drafted for outcome in result.outcomes)
    assert num_drafted > 3
    assert drafter._steps._graphs.by_key
    assert len({size.num_sampled for size in graphs._graphs.by_key}) > 1
    plain, speculative = (
        [texts[f"{mode}{number}"] for number in range(len(ROW_RULES))] for mode in ("off", "auto")
    )
    assert speculative == plain
