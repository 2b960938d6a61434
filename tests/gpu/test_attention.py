"""A row attends with the same bits alone, in a verify pass, in a prefill chunk, in a batch, in a
tree and over scattered pages, at short and at long contexts."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.kernels import LinearPacker
from eesd_dist.page_table import PageTable
from tests.gpu.shapes import Width

pytestmark = pytest.mark.gpu

_PAGE_SIZE = 32
_CHUNK = 512
"""Enough for rows in blocks; the other chunks are shorter."""


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads.
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_attends_with_the_same_bits_in_any_batch(
    width: Width, dtype: DType, device: torch.device, is_small: bool
) -> None:
    packer = LinearPacker(dtype=dtype, numerics="invariant", device=device)
    for length in (300,) if is_small else (300, 4096, 16_384):
        text = AttendedText(width, length, dtype=packer.compute_dtype, device=device)
        assert text.first_difference() is None, f"{length} tokens"


class AttendedText:
    """Text of random heads, stored twice: in contiguous and in scattered pages."""

    def __init__(
        self, width: Width, length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device, self._length = device, length
        num_heads = width.heads + 2 * width.kv_heads
        generator = torch.Generator(device).manual_seed(20261122)
        shape = (length, num_heads, width.head_dim)
        self._heads_THE = torch.randn(shape, generator=generator, device=device).to(dtype)
        num_pages = -(-length // _PAGE_SIZE) + 1
        stride = 5 if num_pages % 7 == 0 else 7
        self._contiguous = tuple(range(num_pages))
        self._scattered = tuple(
            num_pages + (page * stride + 3) % num_pages for page in range(num_pages)
        )
        self._pages = LayerPages(
            num_pages=2 * num_pages,
            page_size=_PAGE_SIZE,
            num_kv_heads=width.kv_heads,
            queries_per_kv=width.heads // width.kv_heads,
            head_dim=width.head_dim,
            dtype=dtype,
            device=device,
        )

    @torch.inference_mode()
    def first_difference(self) -> str | None:
        """Returns where a row's bits first depend on the other rows; None if they never do."""
        chunks = [
            (start, min(_CHUNK, self._length - start)) for start in range(0, self._length, _CHUNK)
        ]
        expected_TD = torch.cat([self._attend([chunk], self._contiguous) for chunk in chunks])
        for start in range(0, self._length, 100):  # the same text in other chunks
            count = min(100, self._length - start)
            mixed_TD = self._attend([(start, count)], self._scattered)
            if not torch.equal(mixed_TD, expected_TD[start : start + count]):
                return f"a chunk over scattered pages at position {start}"
        for position in self._positions():
            for name, mixed_TD, same_TD in self._variants(position, expected_TD):
                if not torch.equal(mixed_TD, same_TD):
                    return f"{name} at position {position}"
        return None

    def _positions(self) -> list[int]:
        """Returns positions near page ends, near the end of the text and in between."""
        page, length = _PAGE_SIZE, self._length
        chosen = {1, page - 1, page, length // 3, length // 2, length - page - 10, length - 10}
        return sorted(position for position in chosen if 0 <= position <= length - 10)

    def _variants(self, start: int, expected_TD: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        for pages, layout in ((self._contiguous, "contiguous"), (self._scattered, "scattered")):
            for count in (1, 2, 5, 9):
                mixed_TD = self._attend([(start, count)], pages)
                name = f"{count} rows over {layout} pages"
                yield name, mixed_TD, expected_TD[start : start + count]
        pair_TD = self._attend([(start, 5), (start, 3)], self._contiguous, self._scattered)
        yield (
            "a batch of 2",
            pair_TD,
            expected_TD[[*range(start, start + 5), *range(start, start + 3)]],
        )
        yield "a tree", self._attend_tree(start), _twice(expected_TD[start : start + 4])
        self._attend([(start, 9)], self._contiguous)  # restores the slots that the tree overwrote

    def _attend(self, chunks: Sequence[tuple[int, int]], *tables: tuple[int, ...]) -> Tensor:
        segments = [
            RowSegment(start, count, PageTable(pages))
            for (start, count), pages in zip(chunks, tables, strict=True)
        ]
        rows_THE = torch.cat([self._heads_THE[start : start + count] for start, count in chunks])
        return self._run(segments, rows_THE)

    def _attend_tree(self, start: int) -> Tensor:
        """Attends the next four tokens as two equal branches with interleaved tokens."""
        parents = (-1, -1, *range(6))
        segment = RowSegment(start, 8, PageTable(self._contiguous), parents)
        return self._run([segment], _twice(self._heads_THE[start : start + 4]))

    def _run(self, segments: Sequence[RowSegment], rows_THE: Tensor) -> Tensor:
        plan = RowPlan.build(
            segments, page_size=_PAGE_SIZE, device=self._device, numerics="invariant"
        )
        padded_THE = rows_THE.new_zeros(plan.num_padded, *rows_THE.shape[1:])
        padded_THE[: len(rows_THE)] = rows_THE
        return self._pages.attend(plan, padded_THE)[: len(rows_THE)]


def _twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0)
