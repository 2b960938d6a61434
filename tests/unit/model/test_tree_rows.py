"""A drafted tree over paged keys: every token attends to the same keys as at the end of a chain."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.model.attention import LayerPages, grouping_is_exact
from eesd_dist.model.rows import AttentionKind, RowPlan, RowSegment
from eesd_dist.transport.thread_group import ThreadGroup, on_ranks
from eesd_dist.trees import depths_of, is_chain, path_to
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
    num_known = draw(st.integers(0, 9))
    first = draw(st.integers(max(1, num_known), 40))
    num_rows = num_known + len(parents)
    if num_known == 0:
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


def seen_by(plan: RowPlan, kind: AttentionKind) -> dict[int, list[int]]:
    """Returns the slots that each row attends to in order, from groups, gathers and masks."""
    seen: dict[int, list[int]] = {}
    for group in plan.groups(kind):
        rows = (
            list(range(group.first_row, group.first_row + group.num_rows))
            if group.rows is None
            else group.rows[: group.num_rows].tolist()
        )
        slots = (
            list(range(group.first_slot, group.first_slot + group.num_keys))
            if group.slots is None
            else group.slots.tolist()
        )
        assert len(slots) == group.num_keys
        before = 0 if group.rows is not None else group.first_row - group.window_start
        for at, row in enumerate(rows):
            assert row not in seen, "a row attends in one group"
            line = 0
            if group.mask is not None and group.mask.shape[2] > 1:
                line = (before + at) * kind.queries_per_kv
            hidden = (
                [False] * group.num_keys
                if group.mask is None
                else group.mask[0, 0, line].isinf().tolist()
            )
            seen[row] = [slot for slot, gone in zip(slots, hidden, strict=True) if not gone]
    return seen


@settings(max_examples=100, deadline=None)
@given(
    made=segments(),
    numerics=st.sampled_from(["invariant", "fast"]),
    window=st.sampled_from([None, 1, 3, 7]),
    per_kv=st.sampled_from([1, 2, 8]),
    row_by_row=st.booleans(),
)
def test_a_row_sees_its_own_past_and_nothing_of_other_branches(
    made: tuple[RowSegment, int, Random],
    numerics: str,
    window: int | None,
    per_kv: int,
    row_by_row: bool,
) -> None:
    segment, page_size, _ = made
    assume(numerics == "invariant" or not row_by_row)  # only `invariant` needs it
    beside = RowSegment(3, 2, (90, 91, 92))
    plan = RowPlan.build(
        [beside, segment],
        page_size=page_size,
        device=CPU,
        numerics=numerics,  # type: ignore[arg-type]
    )
    kind = AttentionKind(
        queries_per_kv=per_kv, window=window, dtype=torch.float32, row_by_row=row_by_row
    )
    seen = seen_by(plan, kind)
    assert sorted(seen) == list(range(plan.num_rows))
    for row in range(segment.num_rows):
        past = past_of(segment, segment.start + row)
        if window is not None:
            past = past[-window:]
        expected = [segment.slot(kv_slot, page_size=page_size) for kv_slot in past]
        found = seen[beside.num_rows + row]
        if numerics == "invariant":
            assert found == expected, "in the order of positions"
        else:
            assert sorted(found) == sorted(expected)


@settings(max_examples=60, deadline=None)
@given(made=segments(), per_kv=st.sampled_from([1, 2, 8]))
def test_a_tree_row_reduces_over_as_many_keys_as_its_position_has_alone(
    made: tuple[RowSegment, int, Random], per_kv: int
) -> None:
    segment, page_size, _ = made
    kind = AttentionKind(queries_per_kv=per_kv, window=None, dtype=torch.float32)
    plan = RowPlan.build([segment], page_size=page_size, device=CPU, numerics="invariant")
    positions = plan.positions_T[: plan.num_rows].tolist()
    for group in plan.groups(kind):
        rows = (
            range(group.first_row, group.first_row + group.num_rows)
            if group.rows is None
            else group.rows[: group.num_rows].tolist()
        )
        assert all(b - a == 1 for a, b in pairwise(positions[row] for row in rows))
        for row in rows:
            assert group.num_keys == (positions[row] // page_size + 1) * page_size
            assert len(past_of(segment, segment.start + row)) == positions[row] + 1


def test_a_tree_that_is_a_chain_is_planned_as_one() -> None:
    kind = AttentionKind(queries_per_kv=2, window=None, dtype=torch.float32)
    for numerics in ("invariant", "fast"):
        named, plain = (
            RowPlan.build(
                [RowSegment(5, 6, (0, 1, 2), parents)], page_size=8, device=CPU, numerics=numerics
            )
            for parents in ((-1, 0, 1, 2), ())
        )
        assert torch.equal(named.positions_T, plain.positions_T)
        assert [(g.first_row, g.num_rows, g.num_keys, g.slots) for g in named.groups(kind)] == [
            (g.first_row, g.num_rows, g.num_keys, g.slots) for g in plain.groups(kind)
        ]


def chain_rows(stages: Stages, tokens: list[int], *, pages: range) -> Tensor:
    """Returns the logits of plain decoding: one row at a time, on consecutive pages."""
    return stages.run_in_pieces(torch.tensor(tokens), pages=pages, pieces=[1] * len(tokens))


def path_rows(stages: Stages, prefix: list[int], path: list[int]) -> Tensor:
    """Returns the same for a path after a prefix that is already cached."""
    rows = [
        stages.run(torch.tensor([token]), [RowSegment(len(prefix) + i, 1, range(16))])
        for i, token in enumerate(path)
    ]
    return torch.cat(rows)


def check_tree(
    stages: Stages, parents: Parents, *, num_prefix: int, num_known: int, seed: int
) -> None:
    """Verifies a tree in full and level by level, and compares it with each path as a chain."""
    rng = Random(seed)
    size = stages.page_size
    prefix = [rng.randrange(96) for _ in range(num_prefix)]
    drafted = [rng.randrange(96) for _ in parents]
    end = num_prefix + len(parents)
    num_pages = -(-end // size)
    whole, levels = (tuple(rng.sample(range(at, at + 12), num_pages)) for at in (16, 32))
    known_TV = chain_rows(stages, prefix, pages=range(16))
    alone = {
        node: path_rows(stages, prefix, [drafted[at] for at in path_to(parents, node)])
        for node in range(len(parents))
    }
    start = num_prefix - num_known
    if start:
        for pages in (whole, levels):
            stages.run(torch.tensor(prefix[:start]), [RowSegment(0, start, pages)])
    rows = torch.tensor([*prefix[start:], *drafted])
    company = RowSegment(0, 3, (60,))
    together = stages.run(
        torch.cat([torch.tensor([5, 6, 7]), rows]),
        [company, RowSegment(start, num_known + len(parents), whole, parents)],
    )[3:]
    assert torch.equal(together[:num_known], known_TV[start:])
    for node in range(len(parents)):
        assert torch.equal(together[num_known + node], alone[node][-1]), f"token {node}"

    stages.run(torch.tensor(prefix[start:]), [RowSegment(start, num_known, levels)])
    at = 0
    depths = depths_of(parents)
    while at < len(parents):
        count = next(
            (n for n in range(1, len(parents) - at) if depths[at + n] != depths[at]),
            len(parents) - at,
        )
        found = stages.run(
            torch.tensor(drafted[at : at + count]),
            [RowSegment(num_prefix + at, count, levels, parents[: at + count])],
        )
        for node in range(at, at + count):
            assert torch.equal(found[node - at], alone[node][-1]), f"token {node} on its level"
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
        check_tree(stages, parents, num_prefix=num_prefix, num_known=(1, 3, 1, 2, 5, 1)[i], seed=i)


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
        check_tree(stages, parents, num_prefix=rng.randint(5, 20), num_known=1, seed=seed)


def test_two_ranks_verify_a_tree_alike(tmp_path: Path) -> None:
    shape = SHAPES["bundled"]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)

    def rank(group: ThreadGroup) -> bool:
        stages = Stages.load(
            tmp_path, dtype="bfloat16", page_size=shape.page_size, num_pages=64, group=group
        )
        check_tree(stages, TREES["static 2 2 1"], num_prefix=31, num_known=2, seed=4)
        return True

    assert on_ranks(2, rank) == [True, True]


@pytest.mark.parametrize("family", ["llama", "mistral, sliding window"])
def test_the_tree_mask_of_fast_numerics_is_the_same_model(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family)
    exact, fast = (
        Stages.load(tmp_path, numerics=numerics, num_pages=64) for numerics in ("invariant", "fast")
    )
    parents = TREES["a comb"]
    tokens = torch.arange(30 + len(parents)) % 96
    for stages in (exact, fast):
        stages.run(tokens[:28], [RowSegment(0, 28, (3, 1, 2))])
    segment = RowSegment(28, 2 + len(parents), (3, 1, 2), parents)
    found_TV, expected_TV = (stages.run(tokens[28:], [segment]) for stages in (fast, exact))
    assert torch.allclose(found_TV, expected_TV, atol=1e-4)
    depths = depths_of(parents)
    assert max(depths) < len(parents), "a tree, or there is nothing to see here"
    assert not is_chain(parents)


@pytest.mark.parametrize(("per_kv", "page_size"), [(1, 32), (2, 4), (4, 16), (8, 64)])
def test_rows_and_branches_attend_in_groups_where_the_self_check_allows(
    per_kv: int, page_size: int
) -> None:
    """True on every x86 machine tried so far; otherwise rows are computed one by one, slowly."""
    assert grouping_is_exact(
        num_kv_heads=2,
        queries_per_kv=per_kv,
        head_dim=32,
        page_size=page_size,
        longest=2_048,
        dtype=torch.float32,
        device=CPU,
        num_threads=torch.get_num_threads(),
    )


def twelve_slots() -> LayerPages:
    return LayerPages(
        num_slots=12,
        num_kv_heads=2,
        queries_per_kv=2,
        head_dim=4,
        dtype=torch.float32,
        device=CPU,
    )


def test_moves_read_every_slot_before_they_write_one() -> None:
    pages = twelve_slots()
    before = torch.randn_like(pages._slots_SHE)
    pages._slots_SHE.copy_(before)
    moves = [(4, 3), (5, 4), (9, 5), (3, 11)]
    pages.move(*torch.tensor(moves).unbind(1))
    expected = before.clone()
    for source, target in moves:
        expected[target] = before[source]
    assert torch.equal(pages._slots_SHE, expected)


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


def test_cleared_pages_hold_nothing_that_outlives_a_mask() -> None:
    pages = twelve_slots()
    pages._slots_SHE.fill_(torch.nan)
    pages.clear()
    assert not pages._slots_SHE.any()
