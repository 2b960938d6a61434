"""Checks that a row attends with the same bits alone, in a verify pass, in a prefill chunk, in a
batch, in a tree and over scattered pages, at short and at long contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.page_table import PageTable

PAGE_SIZE = 32
_CHUNK = 512
"""Enough for rows in blocks; the other pieces are shorter."""


# Shapes: T rows, H heads of all kinds, E channels of a head, D channels of all query heads.
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    num_kv_heads: int
    queries_per_kv: int
    head_dim: int


def first_difference(
    shape: AttentionShape, *, dtype: torch.dtype, device: torch.device, lengths: Sequence[int]
) -> str | None:
    """Returns where a row's bits first depend on the other rows; None if they never do."""
    trials = (_Trial(shape, dtype, device, length) for length in lengths)
    return next(filter(None, (trial.first_difference() for trial in trials)), None)


class _Trial:
    """Text of `length` tokens, stored twice: in contiguous and in scattered pages."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, length: int
    ) -> None:
        self._device, self._length = device, length
        num_heads = (shape.queries_per_kv + 2) * shape.num_kv_heads
        generator = torch.Generator(device).manual_seed(20261122)
        self._heads_THE = torch.randn(
            (length, num_heads, shape.head_dim), generator=generator, device=device
        ).to(dtype)
        each = -(-length // PAGE_SIZE) + 1
        self._side_by_side = tuple(range(each))
        self._scattered = tuple(each + (at * 7 + 3) % each for at in range(each))
        if each % 7 == 0:
            self._scattered = tuple(each + (at * 5 + 3) % each for at in range(each))
        self._pages = LayerPages(
            num_pages=2 * each,
            page_size=PAGE_SIZE,
            num_kv_heads=shape.num_kv_heads,
            queries_per_kv=shape.queries_per_kv,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=device,
        )

    @torch.inference_mode()
    def first_difference(self) -> str | None:
        chunks = [
            (start, min(_CHUNK, self._length - start)) for start in range(0, self._length, _CHUNK)
        ]
        together_TD = torch.cat([self._attend([piece], self._side_by_side) for piece in chunks])
        for start in range(0, self._length, 100):  # the same text in other pieces
            count = min(100, self._length - start)
            found_TD = self._attend([(start, count)], self._scattered)
            if not torch.equal(found_TD, together_TD[start : start + count]):
                return self._said("a chunk over scattered pages", start)
        for at in self._places():
            for what, found_TD, expected_TD in self._variants(at, together_TD):
                if not torch.equal(found_TD, expected_TD):
                    return self._said(what, at)
        return None

    def _places(self) -> list[int]:
        """Returns positions near page ends, near the end of the text and in between."""
        page, length = PAGE_SIZE, self._length
        some = {1, page - 1, page, length // 3, length // 2, length - page - 10, length - 10}
        return sorted(at for at in some if 0 <= at <= length - 10)

    def _variants(self, at: int, together_TD: Tensor) -> list[tuple[str, Tensor, Tensor]]:
        found: list[tuple[str, Tensor, Tensor]] = []
        for pages, where in ((self._side_by_side, ""), (self._scattered, ", scattered pages")):
            for count in (1, 2, 5, 9):
                expected_TD = together_TD[at : at + count]
                found.append(
                    (f"{count} rows{where}", self._attend([(at, count)], pages), expected_TD)
                )
        pair_TD = self._attend([(at, 5), (at, 3)], self._side_by_side, self._scattered)
        expected_TD = torch.cat([together_TD[at : at + 5], together_TD[at : at + 3]])
        found.append(("a batch of two", pair_TD, expected_TD))
        found.append(("a tree", self._attend_tree(at), _twice(together_TD[at : at + 4])))
        self._attend([(at, 9)], self._side_by_side)  # restores the slots that the tree overwrote
        return found

    def _attend(self, pieces: Sequence[tuple[int, int]], *tables: tuple[int, ...]) -> Tensor:
        segments = [
            RowSegment(start, count, PageTable(pages))
            for (start, count), pages in zip(pieces, tables, strict=True)
        ]
        rows_THE = torch.cat([self._heads_THE[start : start + count] for start, count in pieces])
        return self._run(segments, rows_THE)

    def _attend_tree(self, at: int) -> Tensor:
        """Attends the next four tokens as two equal branches with interleaved tokens."""
        parents = (-1, -1, *range(6))
        segment = RowSegment(at, 8, PageTable(self._side_by_side), parents)
        return self._run([segment], _twice(self._heads_THE[at : at + 4]))

    def _run(self, segments: Sequence[RowSegment], rows_THE: Tensor) -> Tensor:
        plan = RowPlan.build(
            segments, page_size=PAGE_SIZE, device=self._device, numerics="invariant"
        )
        padded_THE = rows_THE.new_zeros(plan.num_padded, *rows_THE.shape[1:])
        padded_THE[: len(rows_THE)] = rows_THE
        return self._pages.attend(plan, padded_THE)[: len(rows_THE)]

    def _said(self, what: str, at: int) -> str:
        return f"{what} at position {at} of {self._length}"


def _twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0)
