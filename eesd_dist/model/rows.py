"""Which rows a forward pass computes, where their keys lie, and who attends to what.

Decides it once per pass, for all layers. For `numerics: invariant` the rows of a request are
grouped by the page their position lies in: every row of a group attends over the same number of
keys, up to the end of that page, the later ones masked. So a row meets the same reduction length
alone, in a verify pass and in a prefill chunk. Knows no weights and no request beyond positions
and pages.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eesd_dist.config import Numerics
from eesd_dist.model.kernels import padded_rows

MIN_QUERIES = 4
"""Fewer query rows take another routine in the attention kernel's products."""

QUERY_BLOCK = 32
"""The attention kernel cuts its query rows into blocks of this many, or a multiple."""


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
@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """`count` rows of one segment from row `row` and position `start` on, that attend together."""

    segment: RowSegment
    row: int
    start: int
    count: int


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
            covered = range(segment.start, segment.start + segment.num_rows)
            positions += covered
            slots += [segment.pages[at // size] * size + at % size for at in covered]
        return positions, slots

    def groups(self, kind: AttentionKind) -> tuple[AttentionGroup, ...]:
        """Who attends together, for layers of this kind; built when first asked for."""
        groups = self._groups.get(kind)
        if groups is None:
            groups = self._groups[kind] = tuple(self._build(kind))
        return groups

    def _build(self, kind: AttentionKind) -> list[AttentionGroup]:
        runs = self._runs(kind)
        is_only = len(runs) == 1 and self._is_exact(self.num_padded, kind)
        groups = []
        for run in runs:
            num_keys = self._num_keys(run.start + run.count)
            first_slot, slots_N = self._key_slots(run.segment, num_keys)
            window_start, window_rows = 0, self.num_padded
            if not is_only:
                window_rows = self._company(run.count, kind)
                window_start = min(run.row, self.num_padded - window_rows)
            mask = self._mask(
                kind,
                run,
                before=run.row - window_start,
                window_rows=window_rows,
                num_keys=num_keys,
            )
            groups.append(
                AttentionGroup(
                    first_row=run.row,
                    num_rows=run.count,
                    window_start=window_start,
                    window_rows=window_rows,
                    first_slot=first_slot,
                    num_keys=num_keys,
                    slots=slots_N,
                    mask=mask,
                )
            )
        return groups

    def _is_exact(self, num_rows: int, kind: AttentionKind) -> bool:
        """Whether a call over so many rows has no block that is too short for the promise."""
        if self.numerics == "fast":
            return True
        return not 0 < num_rows * kind.queries_per_kv % QUERY_BLOCK < MIN_QUERIES

    def _company(self, count: int, kind: AttentionKind) -> int:
        """Rows of the call that `count` rows need."""
        while not self._is_exact(count, kind):
            count += 1
        return count

    def _runs(self, kind: AttentionKind) -> list[_Run]:
        runs = []
        row = 0
        for segment in self.segments:
            start, end = segment.start, segment.start + segment.num_rows
            while start < end:
                count = min(end, self._end_of_run(start, kind)) - start
                while self._company(count, kind) > self.num_padded:
                    count = -(-count // 2)
                runs.append(_Run(segment=segment, row=row, start=start, count=count))
                row += count
                start += count
        return runs

    def _end_of_run(self, start: int, kind: AttentionKind) -> int:
        if kind.row_by_row:
            return start + 1
        if self.numerics == "fast":
            return sys.maxsize
        return (start // self.page_size + 1) * self.page_size

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
        self, kind: AttentionKind, run: _Run, *, before: int, window_rows: int, num_keys: int
    ) -> Tensor | None:
        """Zero where a row may look, -inf where not; what company rows see is of no account."""
        sees_all = kind.window is None or kind.window > run.start
        if self.numerics == "fast" and run.count == 1 and sees_all:
            return None
        if run.count == 1:
            mask = self._hidden_keys(kind, first=run.start, num_rows=1, num_keys=num_keys)
            return mask.view(1, 1, 1, num_keys)
        first = run.start - before
        mask = self._hidden_keys(kind, first=first, num_rows=window_rows, num_keys=num_keys)
        each_query = mask.unsqueeze(1).expand(-1, kind.queries_per_kv, -1)
        return each_query.reshape(1, 1, -1, num_keys)

    def _hidden_keys(
        self, kind: AttentionKind, *, first: int, num_rows: int, num_keys: int
    ) -> Tensor:
        """[num_rows, num_keys] of consecutive positions from `first` on."""
        shape = (num_rows, num_keys)
        later = torch.full(shape, -torch.inf, dtype=kind.dtype, device=self.device)
        later.triu_(first + 1)
        if kind.window is None:
            return later
        earlier = torch.full(shape, -torch.inf, dtype=kind.dtype, device=self.device)
        return later.add_(earlier.tril_(first - kind.window))
