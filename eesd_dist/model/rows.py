"""Which rows a forward pass computes, where their keys lie, and who attends to what.

Decides it once per pass, for all layers. For `numerics: invariant` the rows of a request are
grouped by the page their position lies in: every row of a group attends over the same number of
keys, up to the end of that page, the later ones masked. So a row meets the same reduction length
alone, in a verify pass and in a prefill chunk. Knows no weights and no request beyond positions
and pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eesd_dist.config import Numerics
from eesd_dist.model.kernels import padded_rows

MIN_QUERIES = 4
"""Fewer query rows take another routine in the attention kernel's products."""


@dataclass(frozen=True, slots=True)
class RowSegment:
    """One request's consecutive positions [start, start + num_rows)."""

    start: int
    num_rows: int
    pages: Sequence[int]
    """Page table covering positions [0, start + num_rows), in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """What distinguishes one layer's attention from another's, as far as rows are concerned."""

    queries_per_kv: int
    window: int | None
    """How many of the last positions a row may see; None: all."""
    dtype: torch.dtype
    row_by_row: bool = False
    """Every row in a call of its own, where the grouped call fails the self-check."""


# Shapes: T rows (padded), Q query rows (row times queries per KV head), N keys.
@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows [first_row, first_row + num_rows) that attend over the same N keys in one call.

    The call sees a window of rows, which may reach over neighbours that the product needs for
    company and whose results are dropped.
    """

    first_row: int
    num_rows: int
    window_start: int
    window_rows: int
    first_slot: int
    num_keys: int
    slots: Tensor | None
    """Slots to gather when the pages do not lie side by side; else they start at `first_slot`."""
    mask: Tensor | None
    """[1, 1, 1 or Q, N], added to the scores."""


class RowPlan:
    """The rows of one forward pass, shared by all its layers."""

    def __init__(
        self,
        segments: Sequence[RowSegment],
        *,
        page_size: int,
        device: torch.device,
        numerics: Numerics,
    ) -> None:
        self.segments = tuple(segments)
        self.page_size = page_size
        self.device = device
        self.numerics: Numerics = numerics
        self.num_rows = sum(segment.num_rows for segment in segments)
        self.num_padded = padded_rows(self.num_rows, numerics=numerics, device=device)
        positions, slots = self._places()
        positions += [0] * (self.num_padded - self.num_rows)
        self.positions_T = torch.tensor(positions, device=device)
        """Position of every row; 0 for padding."""
        self.first_slot = slots[0]
        self.slots_are_consecutive = slots[-1] - slots[0] == len(slots) - 1 and all(
            later - earlier == 1 for earlier, later in pairwise(slots)
        )
        self.slots_R = torch.tensor(slots, device=device)
        """KV slot of every real row."""
        self._groups: dict[AttentionKind, tuple[AttentionGroup, ...]] = {}

    @classmethod
    def build(
        cls,
        segments: Sequence[RowSegment],
        *,
        page_size: int,
        device: torch.device,
        numerics: Numerics,
    ) -> "RowPlan":
        return cls(segments, page_size=page_size, device=device, numerics=numerics)

    def _places(self) -> tuple[list[int], list[int]]:
        size = self.page_size
        positions: list[int] = []
        slots: list[int] = []
        for segment in self.segments:
            for position in range(segment.start, segment.start + segment.num_rows):
                positions.append(position)
                slots.append(segment.pages[position // size] * size + position % size)
        return positions, slots

    def groups(self, kind: AttentionKind) -> tuple[AttentionGroup, ...]:
        """Who attends together, for layers of this kind; built when first asked for."""
        groups = self._groups.get(kind)
        if groups is None:
            groups = self._groups[kind] = tuple(self._build(kind))
        return groups

    def _build(self, kind: AttentionKind) -> list[AttentionGroup]:
        spans = self._spans(row_by_row=kind.row_by_row)
        groups = []
        for segment, row, start, count in spans:
            num_keys = self._num_keys(start + count)
            window_start, window_rows = self._window(row, count, kind, is_only=len(spans) == 1)
            first_slot, slots_N = self._key_slots(segment, num_keys)
            mask = self._mask(
                kind,
                start=start,
                count=count,
                before=row - window_start,
                window_rows=window_rows,
                num_keys=num_keys,
            )
            groups.append(
                AttentionGroup(
                    row, count, window_start, window_rows, first_slot, num_keys, slots_N, mask
                )
            )
        return groups

    def _window(
        self, row: int, count: int, kind: AttentionKind, *, is_only: bool
    ) -> tuple[int, int]:
        """First row and number of rows of the call: all of them when nobody else attends."""
        if is_only and not kind.row_by_row:
            return 0, self.num_padded
        least = 1 if self.numerics == "fast" else -(-MIN_QUERIES // kind.queries_per_kv)
        window_rows = max(count, least)
        return min(row, self.num_padded - window_rows), window_rows

    def _spans(self, *, row_by_row: bool) -> list[tuple[RowSegment, int, int, int]]:
        """Segment, first row, first position and count of every group."""
        spans = []
        row = 0
        for segment in self.segments:
            start, end = segment.start, segment.start + segment.num_rows
            while start < end:
                stop = end
                if row_by_row:
                    stop = start + 1
                elif self.numerics == "invariant":
                    stop = min(end, (start // self.page_size + 1) * self.page_size)
                spans.append((segment, row, start, stop - start))
                row += stop - start
                start = stop
        return spans

    def _num_keys(self, end: int) -> int:
        if self.numerics == "fast":
            return end
        return -(-end // self.page_size) * self.page_size

    def _key_slots(self, segment: RowSegment, num_keys: int) -> tuple[int, Tensor | None]:
        size = self.page_size
        pages = list(segment.pages[: -(-num_keys // size)])
        first_slot = pages[0] * size
        if pages == list(range(pages[0], pages[0] + len(pages))):
            return first_slot, None
        starts_P1 = torch.tensor(pages, device=self.device).unsqueeze(1) * size
        slots_N = (starts_P1 + torch.arange(size, device=self.device)).view(-1)[:num_keys]
        return first_slot, slots_N

    def _mask(
        self,
        kind: AttentionKind,
        *,
        start: int,
        count: int,
        before: int,
        window_rows: int,
        num_keys: int,
    ) -> Tensor | None:
        """Zero where a row may look, -inf where not; company rows copy their nearest real row."""
        sees_all = kind.window is None or kind.window > start
        if self.numerics == "fast" and count == 1 and sees_all:
            return None
        if count == 1:
            last = torch.full((1, 1), start, device=self.device)
        else:
            offset_W = torch.arange(window_rows, device=self.device) - before
            last_W = offset_W.clamp(0, count - 1) + start
            last = last_W.repeat_interleave(kind.queries_per_kv).unsqueeze(1)
        key_N = torch.arange(num_keys, device=self.device)
        hidden = key_N > last
        if kind.window is not None:
            hidden |= key_N <= last - kind.window
        mask = torch.zeros(hidden.shape, dtype=kind.dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf).view(1, 1, *hidden.shape)
