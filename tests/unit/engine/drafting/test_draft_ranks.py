"""Ranks of a draft stage as threads: together they compute the same as one rank alone."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from eesd_dist.backends.api import ChainStart
from eesd_dist.backends.row_slices import RowSlice
from eesd_dist.config import EngineConfig
from eesd_dist.control.chain_rule import REFUSAL, of_length
from eesd_dist.engine.build import build_draft_shard, head_shelf, load_draft_weights, load_next_head
from eesd_dist.engine.drafting.chain_commands import command_of
from eesd_dist.engine.drafting.ranks import (
    DraftCompute,
    DraftShard,
    HeadShelf,
    LeadingShard,
    follow_commands,
)
from eesd_dist.engine.layout import layout_of
from eesd_dist.errors import CheckpointError, PeerLost, WireError
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.page_table import PageTable
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import draft_choice
from eesd_dist.transport.commands import (
    Command,
    MoveSlots,
    RunHead,
    RunLayers,
    RunLogits,
    TakeHead,
)
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.thread_group import ThreadCommandSource, ThreadGroup
from eesd_dist.types import LoadProgress, SamplingParams
from tests.support.drafters import save_head
from tests.support.thread_ranks import on_ranks, thread_commands
from tests.unit.engine.conftest import MakeConfig

NUM_RANKS = 2
PAGES = PageTable((4, 2, 9))
ROW = RowSegment(0, 1, (0,))

Result = TypeVar("Result")
Work = Callable[[DraftCompute], Result]


def on_one_rank(config: EngineConfig, work: Work[Result]) -> Result:
    shard = build_draft_shard(config, layout_of(config), SingleGroup())
    with torch.inference_mode():
        return work(shard)


def on_every_rank(
    config: EngineConfig, work: Work[Result], *, others: int = NUM_RANKS - 1
) -> Result:
    """Returns the result of `work` on rank 0, while the other ranks follow its commands."""
    torch.set_num_threads(1)
    sink, sources = thread_commands(others, timeout_s=10.0)
    results: list[Result] = []

    def run(group: ThreadGroup) -> None:
        layout = layout_of(config)
        shard = build_draft_shard(config, layout, group)
        if group.rank > 0:
            heads = head_shelf(config, layout, group)
            follow_commands(shard, sources[group.rank - 1], heads=heads)
            return
        leading = LeadingShard(shard, sink)
        try:
            with torch.inference_mode():
                results.append(work(leading))
        finally:
            leading.close()

    on_ranks(1 + others, run)
    return results[0]


def drafted(compute: DraftCompute) -> list[Tensor]:
    """Runs a prefill of which the head stores all but the last rows, two steps of a chain, a level
    of a tree, and the move of its branch."""
    results: list[Tensor] = []

    def step(tokens: list[int], segment: RowSegment) -> None:
        hidden_TD = compute.run_layers(tokens, [segment])
        exit_TD = compute.run_head(hidden_TD, [segment])
        results.extend((hidden_TD, exit_TD, compute.logits(exit_TD[-2:])))

    prompt_TD = compute.run_layers(list(range(5, 18)), [RowSegment(0, 13, PAGES)])
    compute.store_head_kv(prompt_TD[:10], [RowSegment(0, 10, PAGES)])
    results.append(compute.run_head(prompt_TD[10:], [RowSegment(10, 3, PAGES)]))
    step([40], RowSegment(13, 1, PAGES))
    step([41], RowSegment(14, 1, PAGES))
    step([50, 51], RowSegment(15, 2, PAGES, (-1, -1)))
    compute.move([(2 * 16, 4 * 16 + 15)])
    step([60], RowSegment(16, 1, PAGES))
    return results


@pytest.mark.parametrize("head", ["sometimes", "truncated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_compute_what_one_computes(
    head: str, dtype: str, make_config: MakeConfig
) -> None:
    config = make_config(head, dtype=dtype)
    expected, sharded = on_one_rank(config, drafted), on_every_rank(config, drafted)
    assert [x.shape for x in sharded] == [x.shape for x in expected]
    for ours, theirs in zip(sharded, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-4)


def test_ranks_with_parts_that_differ_by_a_row_give_full_rows(
    target: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    config = make_config()
    odd = save_head(target, tmp_path / "odd", "sometimes", draft_vocab=list(range(1, 96, 2))[:-1])
    model = config.model.model_copy(update={"head": odd})
    config = config.model_copy(update={"model": model})
    expected, sharded = on_one_rank(config, drafted), on_every_rank(config, drafted)
    assert sharded[-1].shape[-1] == 47
    assert torch.allclose(sharded[-1], expected[-1], atol=2e-4)


def test_a_row_has_the_same_bits_with_any_others(make_config: MakeConfig) -> None:
    tokens = list(range(3, 33))

    def in_pieces(compute: DraftCompute) -> tuple[Tensor, Tensor]:
        whole_TD = compute.run_layers(tokens, [RowSegment(0, 30, (0, 1))])
        singles = [
            compute.run_layers([token], [RowSegment(at, 1, (5, 7))])
            for at, token in enumerate(tokens)
        ]
        return whole_TD, torch.cat(singles)

    whole_TD, singles_TD = on_every_rank(make_config(), in_pieces)
    assert torch.equal(whole_TD, singles_TD)


def start(max_draft: int, temperature: float, **changes: object) -> ChainStart:
    chain = ChainStart(
        tokens=[40],
        segment=RowSegment(13, 1, PAGES),
        max_draft=max_draft,
        rule=of_length(max_draft),
        temperature=temperature,
        seed=3,
    )
    return chain._replace(**changes)


def after_prompt(compute: DraftCompute, *, num_read: int) -> RowSlice:
    """Runs a prompt; returns the rows of it that the head has not read."""
    prompt_TD = compute.run_layers(list(range(5, 18)), [RowSegment(0, 13, PAGES)])
    compute.run_head(prompt_TD[:num_read], [RowSegment(0, num_read, PAGES)])
    return RowSlice(prompt_TD, num_read, 13)


Drafted = tuple[list[int], list[float], Tensor]


def in_one_call(compute: DraftCompute, length: int, temperature: float) -> Drafted:
    lagging = after_prompt(compute, num_read=9)
    assert compute.drafter is not None
    others = [  # a prompt, and a guess that is not taken
        start(0, 0.0, tokens=[7, 8, 9], segment=RowSegment(0, 3, PageTable((6,)))),
        start(1, 0.8, rule=REFUSAL, segment=RowSegment(0, 1, PageTable((8,)))),
    ]
    chain = start(length, temperature, lagging=[lagging])
    _, (drafted_chain, *_) = compute.drafter.draft([chain, *others])
    return drafted_chain.tokens, drafted_chain.gaps, drafted_chain.rows_TD.tensor


def by_steps(compute: DraftCompute, length: int, temperature: float) -> Drafted:
    unread = [after_prompt(compute, num_read=9).tensor]
    tokens, gaps, rows, token = [], [], [], 40
    for step in range(length + 1):
        at = 13 + step
        hidden_1D = compute.run_layers([token], [RowSegment(at, 1, PAGES)]).clone()
        rows.append(hidden_1D)
        unread.append(hidden_1D)
        if step == length:
            break
        input_ME = torch.cat(unread)
        segment = RowSegment(at + 1 - len(input_ME), len(input_ME), PAGES)
        exit_MD = compute.run_head(input_ME, [segment])
        sampling = SamplingParams(temperature=temperature, seed=3)
        assert compute.head is not None
        choice = draft_choice(
            compute.logits(exit_MD[-1:]),
            [RowRule.of(sampling, position=at + 1, num_prompt=13)],
            vocab_ids=compute.head.vocab_ids,
        )
        token, unread = int(choice.tokens[0, 0]), []
        tokens.append(token)
        gaps.append(float(choice.gaps[0]))
    return tokens, gaps, torch.cat(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("head", ["sometimes", "truncated"])
@pytest.mark.parametrize(("dtype", "others"), [("float32", 1), ("bfloat16", 1), ("float32", 3)])
def test_ranks_draft_in_one_call_what_they_draft_step_by_step(
    dtype: str, others: int, head: str, temperature: float, make_config: MakeConfig
) -> None:
    config = make_config(head, dtype=dtype)
    tokens, gaps, rows_TD = on_every_rank(
        config, lambda compute: by_steps(compute, 4, temperature), others=others
    )
    drafted_tokens, drafted_gaps, drafted_TD = on_every_rank(
        config, lambda compute: in_one_call(compute, 4, temperature), others=others
    )
    assert drafted_tokens == tokens
    assert drafted_gaps == gaps
    assert torch.equal(drafted_TD, rows_TD)


def test_ranks_that_sum_by_messages_have_no_such_call_and_the_same_bits(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    expected = on_every_rank(config, lambda compute: by_steps(compute, 4, 0.8))
    monkeypatch.setattr(ThreadGroup, "sums_on_host", False)

    def work(compute: DraftCompute) -> Drafted:
        assert compute.drafter is None
        return by_steps(compute, 4, 0.8)

    tokens, gaps, rows_TD = on_every_rank(config, work)
    assert (tokens, gaps) == expected[:2]
    assert torch.equal(rows_TD, expected[2])


def test_a_swapped_head_is_the_same_on_every_rank(
    heads: dict[str, Path], make_config: MakeConfig
) -> None:
    def swapped(compute: DraftCompute) -> Tensor:
        config = make_config("never")
        segment = RowSegment(0, 3, (0,))
        hidden_TD = compute.run_layers([5, 6, 7], [segment])
        layout = layout_of(config)
        compute.take_head(load_next_head(config, layout, heads["never"], group=compute.group))
        return compute.logits(compute.run_head(hidden_TD, [segment]))

    config = make_config("sometimes")
    assert torch.allclose(on_every_rank(config, swapped), on_one_rank(config, swapped), atol=2e-4)


def test_progress_is_over_when_the_exit_head_is_there_too(
    heads: dict[str, Path], make_config: MakeConfig
) -> None:
    seen: list[LoadProgress] = []
    config = make_config("sometimes")
    load_draft_weights(config, layout_of(config), SingleGroup(), on_progress=seen.append)
    head_bytes = (heads["sometimes"] / "model.safetensors").stat().st_size
    assert {p.bytes_total for p in seen} == {seen[-1].bytes_done}
    assert [p.piece for p in seen][-2:] == ["embedding", "exit head"]
    assert seen[-1].bytes_done - seen[-2].bytes_done == head_bytes


def chains(**changes: object) -> Command:
    chain = start(2, 0.0, segment=RowSegment(0, 1, PageTable((0,))))
    return command_of([chain._replace(**changes)])


def follower(config: EngineConfig) -> tuple[DraftShard, HeadShelf]:
    layout, group = layout_of(config), SingleGroup()
    return build_draft_shard(config, layout, group), head_shelf(config, layout, group)


def follow_command(config: EngineConfig, command: Command) -> None:
    sink, (source,) = thread_commands(1, timeout_s=1.0)
    sink.announce(command)
    sink.close()
    shard, shelf = follower(config)
    follow_commands(shard, source, heads=shelf)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            RunLayers(tokens=(96,), segments=(RowSegment(0, 1, (0,)),)),
            "found token 96 in a command, expected less than 96",
        ),
        (
            RunLayers(tokens=(1,), segments=(RowSegment(0, 1, (96,)),)),
            "found page 96 in a command, expected less than 96",
        ),
        (
            RunLayers(tokens=(1,), segments=(RowSegment(16, 1, (0,)),)),
            "found KV slot 16 in a command, expected less than 16",
        ),
        (MoveSlots(moves=((0, 96 * 16),)), "found slot 1536 in a command"),
        (chains(tokens=[96]), "found token 96 in a command, expected less than 96"),
        (chains(max_draft=16), "found KV slot 16 in a command, expected less than 16"),
        (chains(mask=b"1234"), "found a mask of 4 bytes, expected a bit a token"),
        (chains(lagging=[RowSlice(torch.zeros(2, 3), 0, 2)]), "found rows of 3 x torch.float32"),
        (
            RunHead(segments=(ROW,), hidden_TD=torch.zeros(1, 3)),
            "found rows of 3 x torch.float32 with a command, expected",
        ),
        (
            RunLogits(exit_AD=torch.zeros(1, 3, dtype=torch.float16)),
            "found rows of 3 x torch.float16 with a command, expected",
        ),
    ],
)
def test_a_follower_refuses_what_lies_outside_its_pages(
    command: Command, message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(WireError, match=message):
        follow_command(make_config(), command)


def test_a_follower_says_when_its_head_is_another(
    heads: dict[str, Path], make_config: MakeConfig
) -> None:
    command = TakeHead(folder=str(heads["never"]), sha256="0" * 64)
    with pytest.raises(CheckpointError, match="put the same files on every node"):
        follow_command(make_config(), command)


def test_a_follower_that_gets_no_command_names_the_leader(make_config: MakeConfig) -> None:
    shard, shelf = follower(make_config())
    _, (source,) = thread_commands(1, timeout_s=0.05)
    assert isinstance(source, ThreadCommandSource)
    with pytest.raises(PeerLost, match="waiting for a command"):
        follow_commands(shard, source, heads=shelf)
