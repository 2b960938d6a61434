"""A drafted tree over paged keys: every token attends to the same keys as at the end of a chain."""

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.transport.thread_group import ThreadGroup
from eesd_dist.trees import depths_of, path_to
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import CPU, Stages
from tests.unit.model.test_invariance import SHAPES, Shape

Parents = tuple[int, ...]

TREES: dict[str, Parents] = {
    "two first tokens": (-1, -1),
    "static 2 2 1": (-1, -1, 0, 1, 0, 1, 2, 3, 4, 5),
    "a comb": (-1, -1, 0, 0, 2, 2, 4, 4, 6, 6),
    "second branch only": (-1, -1, 1, 1, 3, 4),
    "wide": (-1,) * 7,
    "long and late": (-1, 0, 1, 2, 3, 0, 5, 6, -1, 8),
}


@st.composite
def trees(draw: st.DrawFn) -> Parents:
    count = draw(st.integers(1, 12))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(count))


@st.composite
def segments(draw: st.DrawFn) -> tuple[RowSegment, int, Random]:
    """Draws a tree after known rows, or its last tokens only, and the page size."""
    parents = draw(trees())
    page_size = draw(st.sampled_from([2, 4, 16]))
    num_committed = draw(st.integers(0, 9))
    first = draw(st.integers(max(1, num_committed), 40))
    num_rows = num_committed + len(parents)
    if num_committed == 0:
        num_rows = draw(st.integers(1, len(parents)))
    end = first + len(parents)
    rng = Random(draw(st.integers(0, 99)))
    pages = rng.sample(range(64), -(-end // page_size))
    return RowSegment(end - num_rows, num_rows, tuple(pages), parents), page_size, rng


def past_of(segment: RowSegment, kv_slot: int) -> list[int]:
    """Returns, by definition, the known KV slots before it, its ancestors, and itself."""
    first = segment.first_drafted
    if kv_slot < first:
        return list(range(kv_slot + 1))
    path = []
    node = kv_slot - first
    while node >= 0:
        path.append(first + node)
        node = segment.parents[node]
    return [*range(first), *reversed(path)]


def seen_by(plan: RowPlan, row: int) -> list[int]:
    """Returns the slots of the keys that a row attends to, in order."""
    arrays, size = plan.arrays, plan.page_size
    in_order = int(arrays.in_order_R[row])
    kv_slots = list(range(int(arrays.position_R[row]) + 1))
    branch = arrays.branch_slots[int(arrays.branch_R[row]) :].tolist()
    kv_slots[in_order:] = branch[: len(kv_slots) - in_order]
    table = arrays.tables_BW[int(arrays.table_R[row])]
    return [int(table[at // size]) * size + at % size for at in kv_slots]


@settings(max_examples=100, deadline=None)
@given(drawn=segments())
def test_a_row_sees_its_own_past_in_order_and_nothing_of_other_branches(
    drawn: tuple[RowSegment, int, Random],
) -> None:
    segment, page_size, _ = drawn
    beside = RowSegment(3, 2, (90, 91, 92))
    plan = RowPlan.build([beside, segment], page_size=page_size, device=CPU, numerics="invariant")
    assert plan.num_rows == beside.num_rows + segment.num_rows
    assert plan.positions[: plan.num_rows].tolist() == [*beside.positions, *segment.positions]
    for row in range(segment.num_rows):
        past = past_of(segment, segment.start + row)
        expected = [segment.slot(kv_slot, page_size=page_size) for kv_slot in past]
        assert seen_by(plan, beside.num_rows + row) == expected


def test_a_tree_that_is_a_chain_is_planned_as_one() -> None:
    chain, plain = (
        RowPlan.build(
            [RowSegment(5, 6, (0, 1, 2), parents)], page_size=8, device=CPU, numerics="invariant"
        )
        for parents in ((-1, 0, 1, 2), ())
    )
    assert torch.equal(chain.positions, plain.positions)
    for array, expected in zip(chain.arrays, plain.arrays, strict=True):
        assert array.tolist() == expected.tolist()


def chain_rows(stages: Stages, tokens: list[int], *, pages: range) -> Tensor:
    """Returns the logits of plain decoding: one row at a time, on consecutive pages."""
    return stages.run_in_chunks(torch.tensor(tokens), pages=pages, chunks=[1] * len(tokens))


def path_rows(stages: Stages, prefix: list[int], path: list[int]) -> Tensor:
    """Returns the same for a path after a prefix that is already cached."""
    rows = [
        stages.run(torch.tensor([token]), [RowSegment(len(prefix) + i, 1, range(16))])
        for i, token in enumerate(path)
    ]
    return torch.cat(rows)


def check_tree(
    stages: Stages, parents: Parents, *, num_prefix: int, num_committed: int, seed: int
) -> None:
    """Verifies a tree in full and level by level, and compares it with each path as a chain."""
    rng = Random(seed)
    size = stages.page_size
    prefix = [rng.randrange(96) for _ in range(num_prefix)]
    drafted = [rng.randrange(96) for _ in parents]
    end = num_prefix + len(parents)
    num_pages = -(-end // size)
    whole, levels = (tuple(rng.sample(range(at, at + 12), num_pages)) for at in (16, 32))
    prefix_TV = chain_rows(stages, prefix, pages=range(16))
    single_rows = {
        node: path_rows(stages, prefix, [drafted[at] for at in path_to(parents, node)])
        for node in range(len(parents))
    }
    start = num_prefix - num_committed
    if start:
        for pages in (whole, levels):
            stages.run(torch.tensor(prefix[:start]), [RowSegment(0, start, pages)])
    rows = torch.tensor([*prefix[start:], *drafted])
    company = RowSegment(0, 3, (60,))
    batch_TV = stages.run(
        torch.cat([torch.tensor([5, 6, 7]), rows]),
        [company, RowSegment(start, num_committed + len(parents), whole, parents)],
    )[3:]
    assert torch.equal(batch_TV[:num_committed], prefix_TV[start:])
    for node in range(len(parents)):
        assert torch.equal(batch_TV[num_committed + node], single_rows[node][-1]), f"token {node}"

    stages.run(torch.tensor(prefix[start:]), [RowSegment(start, num_committed, levels)])
    at = 0
    depths = depths_of(parents)
    while at < len(parents):
        count = next(
            (n for n in range(1, len(parents) - at) if depths[at + n] != depths[at]),
            len(parents) - at,
        )
        level_TV = stages.run(
            torch.tensor(drafted[at : at + count]),
            [RowSegment(num_prefix + at, count, levels, parents[: at + count])],
        )
        for node in range(at, at + count):
            assert torch.equal(level_TV[node - at], single_rows[node][-1]), (
                f"token {node} on its level"
            )
        at += count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_token_of_a_tree_has_the_bits_of_the_same_token_in_a_chain(
    tmp_path: Path, name: str, dtype: DType
) -> None:
    shape = SHAPES[name]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)
    stages = Stages.load(tmp_path, dtype=dtype, page_size=shape.page_size, num_pages=64)
    size = shape.page_size
    for i, parents in enumerate(TREES.values()):
        # The known row ends a page, is before its end, or the tree extends into the next page.
        num_prefix = (size, size - 1, size - 3, size + 1, 2 * size - 2, 20)[i]
        check_tree(
            stages, parents, num_prefix=num_prefix, num_committed=(1, 3, 1, 2, 5, 1)[i], seed=i
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_hold_over_tiny_pages(tmp_path: Path, dtype: DType) -> None:
    shape = Shape(page_size=4, sizes={})
    save_tiny_model(tmp_path, shape.family, **shape.sizes)
    stages = Stages.load(tmp_path, dtype=dtype, page_size=4, num_pages=64)
    rng = Random(8)
    for seed in range(6):
        count = rng.randint(2, 12)
        parents = tuple(sorted(rng.randint(-1, node - 1) for node in range(count)))
        assert not any(parent >= node for node, parent in enumerate(parents))
        check_tree(stages, parents, num_prefix=rng.randint(5, 20), num_committed=1, seed=seed)


def test_two_ranks_verify_a_tree_alike(tmp_path: Path) -> None:
    shape = SHAPES["bundled"]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)

    def rank(group: ThreadGroup) -> bool:
        stages = Stages.load(
            tmp_path, dtype="bfloat16", page_size=shape.page_size, num_pages=64, group=group
        )
        check_tree(stages, TREES["static 2 2 1"], num_prefix=31, num_committed=2, seed=4)
        return True

    assert on_ranks(2, rank) == [True, True]


def three_pages() -> LayerPages:
    return LayerPages(
        num_pages=3,
        page_size=4,
        num_kv_heads=2,
        queries_per_kv=2,
        head_dim=4,
        dtype=torch.float32,
        device=CPU,
    )


def slots_of(pages: LayerPages) -> Tensor:
    """Returns keys, then values, of each slot."""
    keys_PSKE = pages.keys_PKES.permute(0, 3, 1, 2)
    values_PSKE = pages.values_PKSE.permute(0, 2, 1, 3)
    return torch.cat([keys_PSKE, values_PSKE], dim=2).flatten(0, 1)


def test_moves_read_every_slot_before_they_write_one() -> None:
    pages = three_pages()
    pages.keys_PKES.copy_(torch.randn_like(pages.keys_PKES))
    pages.values_PKSE.copy_(torch.randn_like(pages.values_PKSE))
    before = slots_of(pages)
    moves = [(4, 3), (5, 4), (9, 5), (3, 11)]
    pages.move(*torch.tensor(moves).unbind(1))
    expected = before.clone()
    for source, target in moves:
        expected[target] = before[source]
    assert torch.equal(slots_of(pages), expected)


@pytest.mark.parametrize("name", ["bundled", "window and scattered", "small pages"])
def test_a_moved_branch_is_the_text_as_if_it_had_been_decoded(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)
    stages = Stages.load(tmp_path, page_size=shape.page_size, num_pages=64)
    size, rng = shape.page_size, Random(name)
    for parents, node, num_prefix in (
        (TREES["second branch only"], 4, size - 2),
        (TREES["long and late"], 7, size - 3),
        (TREES["static 2 2 1"], 9, 2 * size - 1),
    ):
        prefix = [rng.randrange(96) for _ in range(num_prefix)]
        drafted = [rng.randrange(96) for _ in parents]
        path = path_to(parents, node)
        after = [rng.randrange(96) for _ in range(3)]
        text = [*prefix, *(drafted[at] for at in path), *after]
        expected_TV = chain_rows(stages, text, pages=range(16))[-len(after) :]
        pages = tuple(rng.sample(range(16, 40), -(-(num_prefix + len(parents)) // size)))
        segment = RowSegment(0, num_prefix + len(parents), pages, parents)
        stages.run(torch.tensor([*prefix, *drafted]), [segment])
        moves = [
            (segment.slot(num_prefix + at, page_size=size), segment.slot(to, page_size=size))
            for to, at in enumerate(path, start=num_prefix)
        ]
        for span in (stages.draft, stages.verify):
            span.move([(source, target) for source, target in moves if source != target])
        start = num_prefix + len(path)
        segment = RowSegment(start, len(after), (*pages, 41))
        assert torch.equal(stages.run(torch.tensor(after), [segment]), expected_TV)


def test_cleared_pages_hold_nothing_that_outlives_a_weight_of_zero() -> None:
    pages = three_pages()
    pages.write([0, 1, 2], torch.full((3 * pages.page_bytes // 4,), torch.nan).view(torch.uint8))
    assert slots_of(pages).isnan().all()
    pages.clear()
    assert not slots_of(pages).any()
