"""The attention kernels against the definition, and every row's bits against the row alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eesd_dist.backends.cpu import attention as cpu_attention
from eesd_dist.backends.cpu import calls
from eesd_dist.backends.cuda import attention as cuda_attention
from eesd_dist.backends.cuda import tiles
from eesd_dist.backends.cuda.attention import CudaAttention
from eesd_dist.backends.cuda.tiles import DeviceRows, Tiling, single_tiles, tiles_of
from eesd_dist.backends.torch.attention import RowByRowAttention
from eesd_dist.model.attention.page_views import keys_in, values_in
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan, RowSegment, row_arrays
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.families.family import Scores
from eesd_dist.model.kv_layout import RowArrays
from eesd_dist.model.slow_kernels import slow_kernels
from eesd_dist.trees import path_to

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_kv: int = 2
    per_kv: int = 2
    head_dim: int = 24
    page_size: int = 32
    window: int | None = None
    softcap: float | None = None

    @property
    def num_heads(self) -> int:
        return (self.per_kv + 2) * self.num_kv

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(
            num_kv_heads=self.num_kv,
            queries_per_kv=self.per_kv,
            head_dim=self.head_dim,
            page_size=self.page_size,
            window=self.window,
            scores=Scores(softcap=self.softcap),
        )

    def pages(self, num_pages: int = 64, dtype: torch.dtype = torch.float32) -> LayerPages:
        return LayerPages(
            num_pages=num_pages,
            page_size=self.page_size,
            num_kv_heads=self.num_kv,
            queries_per_kv=self.per_kv,
            head_dim=self.head_dim,
            dtype=dtype,
            device=CPU,
            window=self.window,
            scores=Scores(softcap=self.softcap),
        )


def plan_of(segments: Sequence[RowSegment], page_size: int) -> RowPlan:
    return RowPlan.build(segments, page_size=page_size, device=CPU, numerics="invariant")


def attend(pages: LayerPages, plan: RowPlan, heads_RHE: Tensor) -> Tensor:
    padded_THE = heads_RHE.new_zeros(plan.num_padded, *heads_RHE.shape[1:])
    padded_THE[: plan.num_rows] = heads_RHE
    return pages.attend(plan, padded_THE)[: plan.num_rows]


def by_definition(shape: Shape, past_NHE: Tensor) -> Tensor:
    """Returns the last row's attention over all rows before it and itself, in float64."""
    num_queries = shape.num_kv * shape.per_kv
    first = 0 if shape.window is None else max(0, len(past_NHE) - shape.window)
    seen_NHE = past_NHE[first:].double()
    heads = []
    for head in range(num_queries):
        kv = num_queries + head % shape.num_kv
        scores_N = seen_NHE[:, kv] @ seen_NHE[-1, head] * shape.head_dim**-0.5
        if shape.softcap is not None:
            scores_N = torch.tanh(scores_N / shape.softcap) * shape.softcap
        heads.append(scores_N.softmax(0) @ seen_NHE[:, kv + shape.num_kv])
    return torch.cat(heads).float()


@dataclass(frozen=True, kw_only=True)
class Text:
    """A request: a prefix that is in the pages, and a segment of known rows and a tree after it."""

    segment: RowSegment
    heads_NHE: Tensor
    """By KV slot, from 0 on."""

    @classmethod
    def drawn(
        cls, shape: Shape, rng: Random, *, pages: list[int], is_short: bool = False
    ) -> "Text":
        start = rng.choice([1, 34] if is_short else [0, 1, 5, 40, 70])
        num_committed = rng.choice([2, 5] if is_short else [1, 2, 9, 40])
        parents: tuple[int, ...] = ()
        if rng.random() < 0.5:
            parents = tuple(
                rng.randint(-1, node - 1) for node in range(rng.randint(1, 5 if is_short else 9))
            )
        end = start + num_committed + len(parents)
        table = tuple(pages.pop() for _ in range(-(-end // shape.page_size)))
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        heads_NHE = torch.randn(end, shape.num_heads, shape.head_dim, generator=generator) * 1.5
        return cls(segment=RowSegment(start, end - start, table, parents), heads_NHE=heads_NHE)

    @property
    def rows(self) -> Tensor:
        return self.heads_NHE[self.segment.start :]

    def past_of(self, row: int) -> Tensor:
        """Returns what the row sees by definition: its ancestors in order, and itself."""
        segment = self.segment
        kv_slot, first = segment.start + row, segment.first_drafted
        if kv_slot < first:
            return self.heads_NHE[: kv_slot + 1]
        path = [first + node for node in path_to(segment.parents, kv_slot - first)]
        return self.heads_NHE[[*range(first), *path]]

    def prefix(self) -> list[RowSegment]:
        start = self.segment.start
        return [RowSegment(0, start, self.segment.pages)] if start else []


def draw_texts(shape: Shape, seed: int) -> tuple[Random, list[Text]]:
    """Returns one to five texts in pages of a store of 400, and the generator they are of."""
    rng = Random(seed)
    free = list(range(400))
    rng.shuffle(free)
    return rng, [Text.drawn(shape, rng, pages=free) for _ in range(rng.randint(1, 5))]


SHAPES = [
    Shape(),
    Shape(page_size=16, head_dim=128, per_kv=8, num_kv=1),
    Shape(page_size=4, head_dim=10, per_kv=3),
    Shape(page_size=20, head_dim=40, per_kv=1, num_kv=3),
    Shape(page_size=2, head_dim=6, per_kv=1, window=3),
    Shape(page_size=16, head_dim=32, per_kv=4, window=17),
    Shape(page_size=8, head_dim=64, per_kv=2, softcap=15.0),
    Shape(page_size=64, head_dim=16, per_kv=2, softcap=5.0, window=30),
]


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
def test_every_row_of_a_batch_is_attention_by_definition_and_has_the_bits_of_the_row_alone(
    shape: Shape, seed: int
) -> None:
    rng, texts = draw_texts(shape, seed)
    pages = shape.pages(400)
    for text in texts:
        for segment in text.prefix():
            plan = plan_of([segment], shape.page_size)
            attend(pages, plan, text.heads_NHE[: segment.num_rows])
    batch_plan = plan_of([text.segment for text in texts], shape.page_size)
    mixed_RD = attend(pages, batch_plan, torch.cat([text.rows for text in texts]))
    row = 0
    for text in texts:
        for at in range(text.segment.num_rows):
            expected_D = by_definition(shape, text.past_of(at))
            assert torch.allclose(mixed_RD[row], expected_D, atol=2e-5, rtol=1e-4)
            single_D = attend_single(shape, text.past_of(at), rng)
            assert torch.equal(mixed_RD[row], single_D), "bits"
            row += 1


def attend_single(shape: Shape, past_NHE: Tensor, rng: Random) -> Tensor:
    """Returns the last row of a text as plain decoding computes it: over a chain in other pages."""
    end = len(past_NHE)
    table = tuple(rng.sample(range(64), -(-end // shape.page_size)))
    pages = shape.pages()
    if end > 1:
        plan = plan_of([RowSegment(0, end - 1, table)], shape.page_size)
        attend(pages, plan, past_NHE[:-1])
    plan = plan_of([RowSegment(end - 1, 1, table)], shape.page_size)
    return attend(pages, plan, past_NHE[-1:])[0]


def test_rows_have_the_same_bits_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape()
    heads_RHE = torch.randn(300, shape.num_heads, shape.head_dim)
    plan = plan_of([RowSegment(0, 200, range(7)), RowSegment(0, 100, range(8, 12))], 32)
    expected_RD = attend(shape.pages(), plan, heads_RHE)
    monkeypatch.setattr(calls, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(attend(shape.pages(), plan, heads_RHE), expected_RD)


def test_no_call_compiles_the_kernel_again() -> None:
    """Numba compiles for each combination of types, which takes seconds: one for each type of keys
    and values."""
    for shape, dtype in product(SHAPES, (torch.float32, torch.bfloat16)):
        heads_RHE = torch.randn(12, shape.num_heads, shape.head_dim)
        tree = RowSegment(0, 9, tuple(range(9)), (-1, -1, 0, 1))
        plan = plan_of([tree, RowSegment(0, 3, (9, 8))], shape.page_size)
        attend(shape.pages(dtype=dtype), plan, heads_RHE)
    assert len(cpu_attention.attention_kernel().signatures) == 2


def test_a_score_that_is_far_below_the_largest_has_no_weight() -> None:
    shape = Shape(num_kv=1, per_kv=1, head_dim=16)
    heads_RHE = torch.zeros(20, 3, 16)
    heads_RHE[:, 0] = 100.0
    heads_RHE[:, 1, 0] = torch.linspace(0.0, 1_000.0, 20)
    heads_RHE[:, 2, 0] = torch.arange(20.0)
    mixed_RD = attend(shape.pages(), plan_of([RowSegment(0, 20, (0,))], 32), heads_RHE)
    assert torch.allclose(mixed_RD[:, 0], torch.arange(20.0), atol=1e-5)


def test_the_kernel_runs_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "file"))
    shape = Shape()
    heads_RHE = torch.randn(5, shape.num_heads, shape.head_dim)
    plan = plan_of([RowSegment(0, 5, (0,))], 32)
    expected_RD = attend(shape.pages(), plan, heads_RHE)
    kernel = cpu_attention.attention_kernel.__wrapped__()
    monkeypatch.setattr(cpu_attention, "attention_kernel", lambda: kernel)
    assert torch.equal(attend(shape.pages(), plan, heads_RHE), expected_RD)


@settings(max_examples=40, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
def test_in_bfloat16_rows_have_the_bits_of_rounded_keys_and_values_in_float32(
    shape: Shape, seed: int
) -> None:
    """Also those of the keys of their own pass: chunks and trees."""
    _, texts = draw_texts(shape, seed)
    wide, narrow = shape.pages(400), shape.pages(400, dtype=torch.bfloat16)
    for segments in ([s for text in texts for s in text.prefix()], [t.segment for t in texts]):
        if not segments:
            continue
        plan = plan_of(segments, shape.page_size)
        heads_RHE = torch.cat(
            [
                text.heads_NHE[segment.start :][: segment.num_rows]
                for segment in segments
                for text in texts
                if text.segment.pages == segment.pages
            ]
        )
        rounded_RHE = heads_RHE.clone()
        num_queries = shape.num_kv * shape.per_kv
        rounded_RHE[:, num_queries:] = heads_RHE[:, num_queries:].bfloat16().float()
        expected_RD = attend(wide, plan, rounded_RHE)
        assert torch.equal(attend(narrow, plan, heads_RHE), expected_RD)
        assert torch.equal(narrow.pages_PKX.float(), wide.pages_PKX), "what is stored"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=16, deadline=None)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 10**6))
def test_without_numba_rows_attend_one_by_one_to_the_same(
    dtype: torch.dtype, shape: Shape, seed: int
) -> None:
    rng = Random(seed)
    free = list(range(400))
    rng.shuffle(free)
    text = Text.drawn(shape, rng, pages=free)
    pages = shape.pages(400, dtype)
    twin_PKX = torch.zeros_like(pages.pages_PKX)
    twin = RowByRowAttention(twin_PKX, shape.attention)
    for segment in (*text.prefix(), text.segment):
        plan = plan_of([segment], shape.page_size)
        heads_RHE = text.heads_NHE[segment.start :][: segment.num_rows]
        expected_RD = attend(pages, plan, heads_RHE)
        assert torch.allclose(twin.attend(plan, heads_RHE), expected_RD, atol=2e-5, rtol=1e-4)
        assert torch.equal(twin_PKX, pages.pages_PKX), "what is stored"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gpu_kernel_computes_what_the_cpu_kernel_does(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs it on the CPU (see tests/conftest.py)."""
    monkeypatch.setattr(cuda_attention, "_MOST_KEYS", 16)
    monkeypatch.setattr(cuda_attention, "PART_BLOCKS", 2)
    monkeypatch.setattr(tiles, "PART_BLOCKS", 2)
    monkeypatch.setattr(cuda_attention, "checked_tiles", lambda *_: True)
    rng = Random(str(shape))
    free = list(range(400))
    rng.shuffle(free)
    texts = [Text.drawn(shape, rng, pages=free, is_short=True) for _ in range(2)]
    pages, twin_PKX = shape.pages(400), torch.zeros_like(shape.pages(400).pages_PKX)
    twin = CudaAttention(twin_PKX, shape.attention)
    keys_PKES, values_PKSE = (
        keys_in(twin_PKX, head_dim=shape.head_dim, page_size=shape.page_size, form="keys by slot"),
        values_in(twin_PKX, head_dim=shape.head_dim, page_size=shape.page_size),
    )

    def compare(segments: list[RowSegment], heads_RHE: Tensor) -> None:
        plan = plan_of(segments, shape.page_size)
        expected_RD = attend(pages, plan, heads_RHE)
        single_RD = attend_alone(twin, plan.arrays, heads_RHE)
        assert torch.allclose(single_RD, expected_RD, atol=2e-5, rtol=1e-4)
        assert torch.equal(keys_PKES, pages.keys_PKES), "what is stored"
        assert torch.equal(values_PKSE, pages.values_PKSE), "what is stored"
        # In tiles, with padding, and the keys in one program or in several: the same bits.
        chosen = twin.tiles(plan.arrays)
        assert len(chosen.first_B) < plan.num_rows or plan.num_rows < 4
        assert chosen.tiling.num_splits > 1 or plan.arrays.position_R.max() < 16
        num_blocks = int(plan.arrays.position_R.max()) // 16 + 1
        for tiling in (
            chosen.tiling,
            chosen.tiling._replace(num_tiles=chosen.tiling.num_tiles + 3),
            chosen.tiling._replace(num_splits=1, split_blocks=0),
            chosen.tiling._replace(num_splits=-(-num_blocks // 2), split_blocks=2),
        ):
            device_rows = twin.placed(
                plan.arrays, num_padded=plan.num_rows + 1, tiles=chosen._replace(tiling=tiling)
            )
            tiled_TD = twin.attend_rows(device_rows, torch.cat([heads_RHE, heads_RHE[:1]]))
            assert torch.equal(tiled_TD[: plan.num_rows], single_RD), tiling

    for text in texts:
        for segment in text.prefix():
            plan = plan_of([segment], shape.page_size)
            heads_RHE = text.heads_NHE[: segment.num_rows]
            attend(pages, plan, heads_RHE)
            device_rows = twin.placed(plan.arrays, num_padded=plan.num_rows)
            twin.store(device_rows, heads_RHE, None)
    compare([text.segment for text in texts], torch.cat([text.rows for text in texts]))


def attend_alone(attention: CudaAttention, arrays: RowArrays, heads_RHE: Tensor) -> Tensor:
    """Stores and attends with a program for each row."""
    device_rows = attention.placed(arrays, num_padded=len(heads_RHE), tiles=single_tiles(arrays))
    attention.store(device_rows, heads_RHE, None)
    return attention.attend_rows(device_rows, heads_RHE)


def test_tiles_and_splits_on_a_gpu_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_MOST_KEYS", 16)
    shape = Shape(num_kv=1, head_dim=8, page_size=8).attention
    compared = partial(cuda_attention.tile_difference, shape, torch.float32, CPU, length=70)
    assert compared() is None
    attend_rows = CudaAttention.attend_rows

    def wrong_where(is_wrong: Callable[[Tiling], bool]) -> str | None:
        def attend_otherwise(self: CudaAttention, rows: DeviceRows, heads_THE: Tensor) -> Tensor:
            mixed_TD = attend_rows(self, rows, heads_THE)
            return 1.001 * mixed_TD if is_wrong(rows.tiling) else mixed_TD

        with monkeypatch.context() as patch:
            patch.setattr(CudaAttention, "attend_rows", attend_otherwise)
            return compared()

    difference = wrong_where(lambda tiling: tiling.rows == 32)
    assert difference is not None
    assert difference.startswith("Tiling(num_tiles=3, rows=32")
    assert difference.endswith("from row 0")
    assert wrong_where(lambda tiling: tiling.split_blocks == 4) is not None
    assert wrong_where(lambda tiling: 1 < tiling.rows < 32) is not None
    monkeypatch.setattr(cuda_attention, "tile_difference", lambda *_, **__: "in a test")
    assert not cuda_attention.checked_tiles.__wrapped__(shape, torch.float32, CPU)
    assert "attention without tiles (in a test)" in slow_kernels()


@pytest.mark.parametrize("queries_per_kv", [1, 3, 4, 7, 8])
def test_tiles_cover_each_row_once(queries_per_kv: int) -> None:
    table, other = tuple(range(40)), tuple(range(40, 80))
    tree = (-1, -1, 0, 1, 2)
    for segments in (
        [RowSegment(0, 1, table)],
        [RowSegment(300, 1, table), RowSegment(7, 5, other)],
        [RowSegment(21, 5, table, tree), RowSegment(6, 2, other)],
        [RowSegment(0, 200, table), RowSegment(9, 1, other)],
    ):
        arrays = row_arrays(segments)
        chosen = tiles_of(arrays, queries_per_kv=queries_per_kv, keys=64, counts=(8, 16, 1000))
        rows = [
            row
            for first, last in zip(chosen.first_B, chosen.last_B, strict=True)
            for row in range(first, last + 1)
        ]
        assert rows == list(range(len(arrays.position_R)))
        assert chosen.tiling.num_tiles in (8, 16, 1000)
        max_rows = int((chosen.last_B - chosen.first_B).max()) + 1
        assert max_rows <= chosen.tiling.rows
        assert chosen.tiling.rows * queries_per_kv <= max(tiles.MOST_QUERIES, queries_per_kv)
        assert chosen.tiling.num_splits * max(1, chosen.tiling.split_blocks) * 64 > (
            arrays.position_R.max() if chosen.tiling.split_blocks else 0
        )


def test_splits_of_long_texts_take_bounded_memory() -> None:
    """A piece of 512 rows after 131,072 keys would have had splits of gigabytes."""
    table = tuple(range(8193))

    def tiling_of(*segments: RowSegment, queries_per_kv: int = 4) -> Tiling:
        arrays = row_arrays(segments)
        return tiles_of(arrays, queries_per_kv=queries_per_kv, keys=128).tiling

    for queries_per_kv in (1, 4):
        for num_rows in (65, 512, 2048):
            chunk = RowSegment(131_000, num_rows, table)
            assert tiling_of(chunk, queries_per_kv=queries_per_kv).num_splits == 1
    assert tiling_of(RowSegment(131_000, 9, table)) == Tiling(1, 16, 256, 4)
    assert tiling_of(*(RowSegment(131_000, 1, table) for _ in range(32))) == Tiling(32, 4, 256, 4)
    assert tiling_of(RowSegment(4000, 500, table)).num_splits == 16
