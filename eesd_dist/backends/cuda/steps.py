"""Steps of drafting on a GPU: rows through the layers, the exit head after them, its guesses.

A step is one upload, one CUDA graph and one copy of the guesses to the host: its some twenty
launches take the host longer than the GPU needs to run them. The kernels are those of layers, head
and rule in the same order, and rows do not depend on each other, so that a row has the same bits
with and without a graph. Does not decide how far to draft.

Every rank of a group queues the same steps, and gathers the best guesses of all ranks in each.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.cuda.choice import (
    NUMBERS_PER_FILTER,
    best_two,
    best_two_of_ranks,
    packed_filters,
    packed_noise,
)
from eesd_dist.backends.cuda.graphs import Graphs
from eesd_dist.backends.cuda.layers import GRAPH_ROWS, CudaLayers
from eesd_dist.backends.cuda.tiles import DeviceRows, RowTiles, Tiling, num_packed, packed_rows
from eesd_dist.backends.row_slices import RowSlice, joined, uploaded
from eesd_dist.model.attention.rows import RowPlan
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kv_layout import Ints, RowArrays
from eesd_dist.model.parallel import rank_range
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.row_filters import RowFilters

_FEW_ROWS = 64
"""Rows that have a graph whatever they are; more have one only if each is another request's, which
excludes prompts."""


# Shapes: T rows of a step, H rows that the head reads, G guesses, D hidden channels, V columns of
# this rank, R ranks.
class HeadRows(NamedTuple):
    """Rows that the head reads in a step, and how it guesses."""

    rows: RowArrays
    source_H: Ints
    """Inputs: rows of the step by their index, and after all of them the lagging ones."""
    last_G: Ints
    """The rows read that a guess follows."""
    divisors: Sequence[float]
    """Temperatures, 0 for a greedy guess."""
    words_G3: Ints
    """Words of the noise keys."""
    filters: RowFilters | None = None
    """None if no guess has any."""
    lagging: Sequence[RowSlice] = ()


class _Reading(Enum):
    NOTHING = 0
    ITS_ROWS = 1
    """Every row of the step is read and followed by a guess."""
    SOME_ROWS = 2


class _Size(NamedTuple):
    """Key of a graph."""

    num_rows: int
    """Rows of the step, with padding; as many may lag, and as many guesses be made."""
    reading: _Reading
    tiling: Tiling
    read_tiling: Tiling | None = None
    """Tiles of the rows read, if they are not those of the step."""
    has_filters: bool = False


class QueuedStep:
    """A step that the GPU may not have run yet."""

    def __init__(
        self, hidden_TD: Tensor, best_G4: Tensor | None, read: Callable[[], Ints] | None
    ) -> None:
        self.hidden_TD = hidden_TD
        """The rows after the layers."""
        self.best_G4 = best_G4
        """Two best tokens of each guess and the bits of their scores; None without guesses.
        Overwritten by the next step, which may have read its tokens before."""
        self._read = read

    def read(self) -> Ints:
        """Waits for the guesses [G, 4]."""
        assert self._read is not None, "a step with guesses"
        return self._read()


class _Downloads:
    """Copies to pinned memory, of which the two latest are kept."""

    def __init__(self) -> None:
        self._pinned: list[Tensor] = []
        self._number = 0

    def start(self, best_G4: Tensor) -> Callable[[], Ints]:
        """Queues the copy; returns what waits for it."""
        if not (best_G4.is_cuda and torch.cuda.is_available()):
            clone_G4 = best_G4.clone()
            return lambda: clone_G4.cpu().numpy()
        if not self._pinned:
            size = GRAPH_ROWS[-1], best_G4.shape[1]
            self._pinned = [
                torch.zeros(size, dtype=best_G4.dtype, pin_memory=True) for _ in range(2)
            ]
        if len(best_G4) > len(self._pinned[0]):
            return lambda: best_G4.cpu().numpy()
        self._number += 1
        copy_G4 = self._pinned[self._number % 2].narrow(0, 0, len(best_G4))
        copy_G4.copy_(best_G4, non_blocking=True)
        event = torch.cuda.current_stream(best_G4.device).record_event()

        def read() -> Ints:
            event.synchronize()
            return copy_G4.numpy()

        return read


class DraftSteps:
    """Layers [0, N) and the exit head, or one rank's part of them, as steps that are queued one
    after the other: graphs share memory."""

    def __init__(
        self, span: LlamaSpan, head: ExitHead, layers: CudaLayers, head_layers: CudaLayers
    ) -> None:
        self._span, self._head = span, head
        self._layers, self._head_layers = layers, head_layers
        self._device = span.paged.device
        self._graphs: Graphs[_Size, tuple[Tensor, Tensor]] = Graphs(
            self._device, name="drafting", group=layers.group
        )
        self._lagging_TD = torch.zeros(
            GRAPH_ROWS[-1], span.spec.hidden_size, dtype=span.compute_dtype, device=self._device
        )
        self._downloads = _Downloads()
        self._group = layers.group
        self._ids_V = head.vocab_ids
        """Tokens of this rank's columns; None where a column is its token."""
        if self._group.size > 1:
            columns = rank_range(head.vocab_size, self._group.rank, self._group.size)
            all_V = torch.arange(head.vocab_size) if head.vocab_ids is None else head.vocab_ids
            ids_V = all_V[columns.start : columns.stop]
            self._ids_V = ids_V.to(device=self._device, dtype=torch.int32)

    def queue(
        self, tokens: Sequence[int] | Tensor, rows: RowArrays, head: HeadRows | None
    ) -> "QueuedStep":
        """Queues the rows of these tokens, and the guesses after those of `head`. Tokens that are
        on the GPU only where `may_queue_ahead` says so."""
        reading, num_rows = self._reading(rows, head), len(rows.position_R)
        if reading is None:
            assert not isinstance(tokens, Tensor)
            hidden_TD, best_G4 = self._without_graph(tokens, rows, head)
        else:
            num_padded = next(count for count in GRAPH_ROWS if count >= num_rows)
            tiles = self._layers.tiles(rows)
            size, read_tiles = _Size(num_padded, reading, tiles.tiling), None
            if reading is _Reading.SOME_ROWS:
                assert head is not None
                read_tiles = self._head_layers.tiles(head.rows)
                size = size._replace(read_tiling=read_tiles.tiling)
            if head is not None and head.filters is not None:
                size = size._replace(has_filters=True)
            packed = _packed(size, tokens, (rows, tiles), (head, read_tiles))
            padded_TD, best_G4 = self._as_graph(size, packed, tokens, head)
            hidden_TD = padded_TD.narrow(0, 0, num_rows).clone()
        if head is None:
            return QueuedStep(hidden_TD, None, None)
        best_G4 = best_G4.narrow(0, 0, len(head.last_G))
        return QueuedStep(hidden_TD, best_G4, self._downloads.start(best_G4))

    @property
    def has_filters(self) -> bool:
        return self._group.size == 1

    def may_queue_ahead(self, num_rows: int) -> bool:
        """Returns whether a step of so many chains, a row each, can have its tokens on the GPU."""
        return self._is_padded and num_rows <= GRAPH_ROWS[-1]

    @property
    def _is_padded(self) -> bool:
        """True if steps are as graphs have them. The same on every rank of a group, of which one
        may have no room for graphs."""
        return self._graphs.has_room or self._group.size > 1

    def _reading(self, rows: RowArrays, head: HeadRows | None) -> _Reading | None:
        """Returns None for a step without a graph."""
        num_rows = len(rows.position_R)
        is_short = num_rows <= max(_FEW_ROWS, len(rows.tables_BW))
        if not (self._is_padded and is_short and num_rows <= GRAPH_ROWS[-1]):
            return None
        if head is None:
            return _Reading.NOTHING
        if len(head.last_G) == len(head.source_H) == num_rows:
            return _Reading.ITS_ROWS
        num_padded = next(count for count in GRAPH_ROWS if count >= num_rows)
        num_lagging = sum(row_slice.count for row_slice in head.lagging)
        return _Reading.SOME_ROWS if num_lagging <= num_padded else None

    def _as_graph(
        self, size: _Size, packed: Ints, tokens: Sequence[int] | Tensor, head: HeadRows | None
    ) -> tuple[Tensor, Tensor]:
        self._graphs.upload(packed)
        if isinstance(tokens, Tensor):
            self._graphs.numbers.narrow(0, 0, len(tokens)).copy_(tokens)
        if head is not None and head.lagging:
            lagging_TD = joined(head.lagging)
            self._lagging_TD.narrow(0, 0, len(lagging_TD)).copy_(lagging_TD)
        if not self._layers.has_graphs(size.num_rows):
            return self._step(size)
        return self._graphs.run(size, lambda: self._step(size))

    def _step(self, size: _Size) -> tuple[Tensor, Tensor]:
        """Launches the kernels over what is in the buffers."""
        count, lengths = size.num_rows, _lengths(size)
        numbers = self._graphs.numbers
        num_slots = len(numbers) - sum(lengths)
        tokens_T, by_row, *reading, slots = torch.split(numbers, [*lengths, num_slots])
        rows = DeviceRows(by_row, count, size.tiling, slots=slots)
        x_TD = self._span.embed(tokens_T).to(self._span.compute_dtype)
        hidden_TD = self._layers.run(x_TD, rows)
        if size.reading is _Reading.NOTHING:
            return hidden_TD, tokens_T
        *reading, noise, filters_G4 = reading
        if size.reading is _Reading.ITS_ROWS:
            out_GD = self._head_layers.run(hidden_TD.clone(), rows)
        else:
            source_H, by_read_row, last_G = reading
            assert size.read_tiling is not None
            read = DeviceRows(by_read_row, 2 * count, size.read_tiling, slots=slots)
            lagging_TD = self._lagging_TD.narrow(0, 0, count)
            input_HD = torch.cat([hidden_TD, lagging_TD]).index_select(0, source_H)
            out_GD = self._head_layers.run(input_HD, read).index_select(0, last_G)
        return hidden_TD, self._guesses(out_GD, noise, filters_G4 if size.has_filters else None)

    def _guesses(self, out_GD: Tensor, noise: Tensor, filters_G4: Tensor | None) -> Tensor:
        """Returns the two best tokens after rows of the head, [G, 4], the same on every rank."""
        best_G4 = best_two(self._head.logits_head(out_GD), noise, self._ids_V, filters_G4)
        if self._group.size == 1:
            return best_G4
        best_RG4 = torch.stack(self._group.all_gather(best_G4))
        return best_two_of_ranks(best_RG4, vocab_size=self._span.spec.vocab_size)

    def _without_graph(
        self, tokens: Sequence[int], rows: RowArrays, head: HeadRows | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the same from a call of each part: the layers of a long prompt have no graph, or
        the head reads many rows."""
        tokens_T = uploaded(tokens, self._device)
        hidden_TD = self._span.forward(self._span.embed(tokens_T), self._plan(rows))
        if head is None:
            return hidden_TD, tokens_T
        rows_TD = torch.cat([hidden_TD, *(row_slice.tensor for row_slice in head.lagging)])
        input_HD = rows_TD.index_select(0, self._on_device(head.source_H))
        out_HD = self._head.forward(input_HD, self._plan(head.rows))
        noise = packed_noise(head.divisors, head.words_G3, num_padded=len(head.last_G))
        out_GD = out_HD.index_select(0, self._on_device(head.last_G))
        filters_G4 = None
        if head.filters is not None:
            filters_G4 = self._on_device(packed_filters(head.filters, num_padded=len(head.last_G)))
        return hidden_TD, self._guesses(out_GD, self._on_device(noise), filters_G4)

    def _plan(self, rows: RowArrays) -> RowPlan:
        num_rows = len(rows.position_R)
        return RowPlan(
            rows, num_padded=num_rows, page_size=self._span.paged.page_size, device=self._device
        )

    def _on_device(self, indices: Ints) -> Tensor:
        return torch.from_numpy(indices).to(self._device, non_blocking=True)


def _lengths(size: _Size) -> list[int]:
    """Returns how many numbers each part of an upload has, without the slots at its end."""
    count = size.num_rows
    lengths = [count, num_packed(count, size.tiling.num_tiles)]
    if size.reading is _Reading.SOME_ROWS:
        assert size.read_tiling is not None
        lengths += [2 * count, num_packed(2 * count, size.read_tiling.num_tiles), count]
    if size.reading is _Reading.NOTHING:
        return lengths
    return [*lengths, 4 * count, NUMBERS_PER_FILTER * count if size.has_filters else 0]


def _packed(
    size: _Size,
    tokens: Sequence[int] | Tensor,
    step: tuple[RowArrays, RowTiles],
    reading: tuple[HeadRows | None, RowTiles | None],
) -> Ints:
    """Returns a step in one array, as `_step` cuts it."""
    count, (head, read_tiles) = size.num_rows, reading
    packed, end = packed_rows(*step, count), num_packed(count, size.tiling.num_tiles)
    arrays = [_padded(() if isinstance(tokens, Tensor) else tokens, count), packed[:end]]
    if head is not None:
        if read_tiles is not None:
            num_rows = len(tokens)
            # Lagging rows have their place after the padding.
            source_H = np.where(
                head.source_H < num_rows, head.source_H, head.source_H + (count - num_rows)
            )
            read = packed_rows(head.rows, read_tiles, 2 * count)
            read = read[: num_packed(2 * count, read_tiles.tiling.num_tiles)]
            arrays += [_padded(source_H, 2 * count), read, _padded(head.last_G, count)]
        arrays.append(packed_noise(head.divisors, head.words_G3, num_padded=count))
        if head.filters is not None:
            arrays.append(packed_filters(head.filters, num_padded=count))
    return np.concatenate([*arrays, packed[end:]])


def _padded(values: Sequence[int] | Ints, count: int) -> Ints:
    padded = np.zeros(count, np.int32)
    padded[: len(values)] = values
    return padded
