"""Plans a forward pass: its rows, the slots of their keys, and which rows attend together.

The plan is made once per pass, for all layers. With `numerics: invariant` the rows of a request are
grouped by the page of their position: every row of a group attends over the same number of keys, up
to the end of that page, with later keys masked. A row therefore has the same reduction length
alone, in a verify pass and in a prefill chunk.

A drafted tree is then a set of chains that share keys: each of its branches attends over gathered
slots in the order of positions, so that a token of a tree is computed with the same sums as at the
end of a chain. With `numerics: fast` a mask selects the ancestors of each token (Miao et al. 2023,
arXiv 2305.09781) and the whole segment is one call. Depends on positions and pages only.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eesd_dist.config import Numerics
from eesd_dist.model.kernels import padded_rows
from eesd_dist.transport.contracts import RowSegment as RowSegment
from eesd_dist.trees import depths_of, path_to, runs_of

MIN_QUERIES = 4
"""With fewer query rows the attention kernel's products use another routine."""

QUERY_BLOCK = 32
"""The attention kernel splits its query rows into blocks of this size, or a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Properties of a layer's attention that affect how rows are grouped."""

    queries_per_kv: int
    window: int | None
    """How many of the last positions a row may see; None: all."""
    dtype: torch.dtype
    row_by_row: bool = False
    """Attends every row in a separate call, padded with copies of the row, where the grouped call
    fails the self-check."""


# Shapes: T rows (padded), Q query rows (row times queries per KV head), N keys.
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Rows [first_row, first_row + num_rows) that attend over the same N keys in one call.

    The call computes a window of rows, which may include neighbouring rows as padding; their
    results are dropped. Rows of a branch that are not contiguous are gathered instead, and the last
    one is repeated as padding.
    """

    first_row: int
    num_rows: int
    window_start: int
    window_rows: int
    first_slot: int
    num_keys: int
    slots: Tensor | None
    """Slots to gather; None if the slots are contiguous from `first_slot` on."""
    mask: Tensor | None
    """[1, 1, 1 or Q, N], added to the scores."""
    rows: Tensor | None = None
    """[window_rows] the rows to gather; results of the first `num_rows` are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """`count` rows of one segment that attend together, from row `row` and position `start` on."""

    segment: RowSegment
    row: int
    start: int
    count: int
    branch: tuple[int, ...] = ()
    """KV slots of a tree's tokens on the path to these rows, in order of position."""
    scattered: tuple[int, ...] = ()
    """All the rows, if they are not contiguous."""


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
            positions += segment.positions
            slots += [segment.pages[at // size] * size + at % size for at in covered]
        return positions, slots

    def groups(self, kind: AttentionKind) -> tuple[AttentionGroup, ...]:
        """Returns the rows that attend together in layers of this kind; built on first use."""
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
            first_slot, slots_N = self._key_slots(run, num_keys)
            window_start, window_rows, rows_W = 0, self.num_padded, None
            if run.scattered or kind.row_by_row:
                window_rows = self._company(run.count, kind)
                window_start = run.row
                rows_W = self._gathered(run, window_rows)
            elif not is_only:
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
                    rows=rows_W,
                )
            )
        return groups

    def _gathered(self, run: _Run, window_rows: int) -> Tensor:
        """Returns the rows of a separate call, a run's rows first. Row by row, every row then has
        the same shape and the same place in the call: where grouping is not exact, a row's bits
        depend on both."""
        rows = run.scattered or (run.row,)
        return torch.tensor((*rows, *rows[-1:] * (window_rows - run.count)), device=self.device)

    def _is_exact(self, num_rows: int, kind: AttentionKind) -> bool:
        """Returns whether a call with this many rows has no block that is too short to be exact."""
        if self.numerics == "fast":
            return True
        return not 0 < num_rows * kind.queries_per_kv % QUERY_BLOCK < MIN_QUERIES

    def _company(self, count: int, kind: AttentionKind) -> int:
        """Returns the number of rows, with padding, of a call for `count` rows."""
        while not self._is_exact(count, kind):
            count += 1
        return count

    def _runs(self, kind: AttentionKind) -> list[_Run]:
        runs: list[_Run] = []
        row = 0
        for segment in self.segments:
            if segment.is_tree and self.numerics == "invariant":
                runs += self._tree_runs(segment, row, kind)
            else:
                runs += self._chain_runs(segment, row, kind)
            row += segment.num_rows
        return runs

    def _chain_runs(self, segment: RowSegment, row: int, kind: AttentionKind) -> list[_Run]:
        runs = []
        start, end = segment.start, segment.start + segment.num_rows
        while start < end:
            count = min(end, self._end_of_run(start, kind)) - start
            while self._company(count, kind) > self.num_padded:
                count = -(-count // 2)
            runs.append(_Run(segment=segment, row=row, start=start, count=count))
            row += count
            start += count
        return runs

    def _tree_runs(self, segment: RowSegment, row: int, kind: AttentionKind) -> list[_Run]:
        """Returns the runs of each branch; the first branch includes the rows before the draft."""
        first = segment.first_drafted
        known = list(range(segment.start, first))
        runs: list[_Run] = []
        for nodes in runs_of(segment.parents):
            path = path_to(segment.parents, nodes[-1])
            branch = tuple(first + node for node in path)
            kv_slots = [*known, *(first + node for node in nodes if first + node >= segment.start)]
            position = first + len(path) - len(kv_slots)
            known = []
            while kv_slots:
                count = min(len(kv_slots), self._end_of_run(position, kind) - position)
                while self._company(count, kind) > self.num_padded:
                    count = -(-count // 2)
                rows = tuple(row + kv_slot - segment.start for kv_slot in kv_slots[:count])
                is_side_by_side = rows[-1] - rows[0] == count - 1
                runs.append(
                    _Run(
                        segment=segment,
                        row=rows[0],
                        start=position,
                        count=count,
                        branch=branch,
                        scattered=() if is_side_by_side else rows,
                    )
                )
                position += count
                del kv_slots[:count]
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

    def _key_slots(self, run: _Run, num_keys: int) -> tuple[int, Tensor | None]:
        """Returns the keys' slots in order of position; of a tree, only those of the branch."""
        size = self.page_size
        pages = list(run.segment.pages[: -(-num_keys // size)])
        first_slot = pages[0] * size
        detour = self._detour(run, num_keys)
        if not detour and pages == list(range(pages[0], pages[0] + len(pages))):
            return first_slot, None
        starts_P1 = torch.tensor(pages, device=self.device).unsqueeze(1) * size
        slots_N = (starts_P1 + torch.arange(size, device=self.device)).view(-1)[:num_keys]
        if detour:
            first = run.segment.first_drafted
            slots_N[first : first + len(detour)] = torch.tensor(detour, device=self.device)
        return first_slot, slots_N

    def _detour(self, run: _Run, num_keys: int) -> list[int]:
        """Returns the slots of a branch's tokens among the first `num_keys`; none if in order."""
        first = run.segment.first_drafted
        branch = run.branch[: max(0, num_keys - first)]
        if branch == tuple(range(first, first + len(branch))):
            return []
        return [run.segment.slot(kv_slot, page_size=self.page_size) for kv_slot in branch]

    def _mask(
        self, kind: AttentionKind, run: _Run, *, before: int, window_rows: int, num_keys: int
    ) -> Tensor | None:
        """Returns 0 for visible keys and -inf for hidden ones; padding rows are irrelevant."""
        if self.numerics == "fast" and run.segment.is_tree:
            mask = self._tree_mask(kind, run.segment)
            each_query = mask.unsqueeze(1).expand(-1, kind.queries_per_kv, -1)
            return each_query.reshape(1, 1, -1, num_keys)
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
        """Returns the mask [num_rows, num_keys] of consecutive positions from `first` on."""
        shape = (num_rows, num_keys)
        later = torch.full(shape, -torch.inf, dtype=kind.dtype, device=self.device)
        later.triu_(first + 1)
        if kind.window is None:
            return later
        earlier = torch.full(shape, -torch.inf, dtype=kind.dtype, device=self.device)
        return later.add_(earlier.tril_(first - kind.window))

    def _tree_mask(self, kind: AttentionKind, segment: RowSegment) -> Tensor:
        """Returns the mask [num_rows, start + num_rows]: a row sees its ancestors only."""
        first, end = segment.first_drafted, segment.start + segment.num_rows
        depths = depths_of(segment.parents)
        position_of = [*range(first), *(first - 1 + depth for depth in depths)]
        hidden = torch.full((segment.num_rows, end), -torch.inf)
        for row, kv_slot in enumerate(range(segment.start, end)):
            past = list(range(min(kv_slot + 1, first)))
            if kv_slot >= first:
                past += [first + node for node in path_to(segment.parents, kv_slot - first)]
            if kind.window is not None:
                oldest = position_of[kv_slot] - kind.window
                past = [at for at in past if position_of[at] > oldest]
            hidden[row, past] = 0.0
        return hidden.to(device=self.device, dtype=kind.dtype)
