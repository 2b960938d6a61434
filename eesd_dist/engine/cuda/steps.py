"""Steps of drafting on a GPU: rows through the layers, the exit head after them, its guesses.

A step is one upload, one CUDA graph and one copy of the guesses to the host: its some twenty
launches take the host longer than the GPU needs to run them. The kernels are those of layers, head
and rule in the same order, and rows do not depend on each other, so that a row has the same bits
with and without a graph. Does not decide how far to draft.
"""

import logging
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eesd_dist.engine.row_slices import RowSlice, joined
from eesd_dist.model.attention.cuda_attention import SPLIT_ROWS
from eesd_dist.model.attention.rows import DeviceRows, RowPlan, num_packed, num_parts, packed_rows
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kv_layout import Ints, RowArrays
from eesd_dist.model.layers.cuda_layers import GRAPH_ROWS, CudaLayers, Graph, graph_pool
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.gpu_rule import best_two, best_two_on_gpu, packed_noise

_FEW_ROWS = 64
"""Up to this many rows have a graph whatever they are; more only if each is another request's,
which excludes prompts."""
_NUMBERS = 1 << 15
"""First size of the buffer for what is uploaded."""

logger = logging.getLogger(__name__)


# Shapes: T rows of a step, H rows that the head reads, G guesses, D hidden channels.
class HeadRows(NamedTuple):
    """What the head reads in a step, and how it guesses."""

    rows: RowArrays
    source_H: Ints
    """Inputs: rows of the step by their index, and after all of them the lagging ones."""
    last_G: Ints
    """The rows read that a guess follows."""
    divisors: Sequence[float]
    """Temperatures, 0 for a greedy guess."""
    words_G3: Ints
    """Of the noise keys."""
    lagging: Sequence[RowSlice] = ()


class _Reading(Enum):
    NOTHING = 0
    ITS_ROWS = 1
    """Every row of the step is read and followed by a guess."""
    SOME_ROWS = 2


class _Size(NamedTuple):
    """What a graph is made for."""

    num_rows: int
    """Of the step, with padding; as many may lag, and as many guesses be made."""
    reading: _Reading
    num_parts: int


class DraftSteps:
    """Layers [0, N) and the exit head of one rank. One step at a time: graphs share memory."""

    def __init__(
        self, span: LlamaSpan, head: ExitHead, layers: CudaLayers, head_layers: CudaLayers
    ) -> None:
        self._span, self._head = span, head
        self._layers, self._head_layers = layers, head_layers
        self._device = span.paged.device
        self._numbers = torch.zeros(_NUMBERS, dtype=torch.int32, device=self._device)
        self._lagging_TD = torch.zeros(
            GRAPH_ROWS[-1], span.spec.hidden_size, dtype=span.compute_dtype, device=self._device
        )
        self._pool = graph_pool(self._device)
        self._has_graphs = True
        self._graphs: dict[_Size, Graph[tuple[Tensor, Tensor]]] = {}

    def run(
        self, tokens: Sequence[int], rows: RowArrays, head: HeadRows | None
    ) -> tuple[Tensor, Ints]:
        """Computes the rows of these tokens, and guesses after those of `head`.

        Returns the rows [T, D] after the layers, and of each guess the two best tokens and the bits
        of their scores [G, 4].
        """
        size = self._size_of(rows, head)
        if size is None:
            hidden_TD, best_G4 = self._by_parts(tokens, rows, head)
        else:
            found_TD, best_G4 = self._as_graph(size, _packed(size, tokens, rows, head), head)
            hidden_TD = found_TD.narrow(0, 0, len(tokens)).clone()
        if head is None:
            return hidden_TD, np.zeros((0, 4), np.int32)
        return hidden_TD, best_G4.narrow(0, 0, len(head.last_G)).cpu().numpy()

    def _size_of(self, rows: RowArrays, head: HeadRows | None) -> _Size | None:
        """Returns None for a step without a graph."""
        num_rows = len(rows.position_R)
        is_short = num_rows <= max(_FEW_ROWS, len(rows.tables_BW))
        if not (self._has_graphs and is_short and num_rows <= GRAPH_ROWS[-1]):
            return None
        num_padded = next(count for count in GRAPH_ROWS if count >= num_rows)
        parts = num_parts(rows) if num_padded <= SPLIT_ROWS else 1
        if head is None:
            return _Size(num_padded, _Reading.NOTHING, parts)
        if len(head.last_G) == len(head.source_H) == num_rows:
            return _Size(num_padded, _Reading.ITS_ROWS, parts)
        num_lagging = sum(piece.count for piece in head.lagging)
        return _Size(num_padded, _Reading.SOME_ROWS, parts) if num_lagging <= num_padded else None

    def _as_graph(self, size: _Size, packed: Ints, head: HeadRows | None) -> tuple[Tensor, Tensor]:
        if len(packed) > len(self._numbers):
            self._numbers = self._numbers.new_zeros(2 * len(packed))
            self._graphs.clear()
        self._numbers.narrow(0, 0, len(packed)).copy_(torch.from_numpy(packed), non_blocking=True)
        if head is not None and head.lagging:
            lagging_TD = joined(head.lagging)
            self._lagging_TD.narrow(0, 0, len(lagging_TD)).copy_(lagging_TD)
        graph = self._graphs.get(size)
        if graph is not None:
            return graph.replay()
        found = self._step(size)  # compiles the kernels
        try:
            self._graphs[size] = Graph(lambda: self._step(size), self._pool)
        except RuntimeError as error:  # no memory, or an operation that graphs do not have
            logger.warning("no_graphs drafting rows=%d error=%s", size.num_rows, error)
            self._has_graphs = False
            self._graphs.clear()
        return found

    def _step(self, size: _Size) -> tuple[Tensor, Tensor]:
        """Launches the kernels over what is in the buffers."""
        count, lengths = size.num_rows, _lengths(size)
        rest = len(self._numbers) - sum(lengths)
        tokens_T, by_row, *reading, slots = torch.split(self._numbers, [*lengths, rest])
        rows = DeviceRows(by_row, count, num_parts=size.num_parts, slots=slots)
        x_TD = self._span.embed(tokens_T).to(self._span.compute_dtype)
        hidden_TD = self._layers.run(x_TD, rows)
        if size.reading is _Reading.NOTHING:
            return hidden_TD, tokens_T
        if size.reading is _Reading.ITS_ROWS:
            out_GD = self._head_layers.run(hidden_TD.clone(), rows)
            (noise,) = reading
        else:
            source_H, by_read_row, last_G, noise = reading
            read = DeviceRows(by_read_row, 2 * count, num_parts=size.num_parts, slots=slots)
            lagging_TD = self._lagging_TD.narrow(0, 0, count)
            input_HD = torch.cat([hidden_TD, lagging_TD]).index_select(0, source_H)
            out_GD = self._head_layers.run(input_HD, read).index_select(0, last_G)
        return hidden_TD, best_two(self._head.logits(out_GD), noise, self._head.vocab_ids)

    def _by_parts(
        self, tokens: Sequence[int], rows: RowArrays, head: HeadRows | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the same from a call of each part: the layers of a long prompt have no graph, or
        the head reads many rows."""
        tokens_T = torch.tensor(tokens, device=self._device)
        hidden_TD = self._span.forward(self._span.embed(tokens_T), self._plan(rows))
        if head is None:
            return hidden_TD, tokens_T
        every_TD = torch.cat([hidden_TD, *(piece.tensor for piece in head.lagging)])
        input_HD = every_TD.index_select(0, self._on_device(head.source_H))
        out_HD = self._head.forward(input_HD, self._plan(head.rows))
        logits_GV = self._head.logits(out_HD.index_select(0, self._on_device(head.last_G)))
        best_G4 = best_two_on_gpu(logits_GV, head.divisors, head.words_G3, self._head.vocab_ids)
        return hidden_TD, best_G4

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
    reading = {
        _Reading.NOTHING: [],
        _Reading.ITS_ROWS: [4 * count],
        _Reading.SOME_ROWS: [2 * count, num_packed(2 * count), count, 4 * count],
    }
    return [count, num_packed(count), *reading[size.reading]]


def _packed(size: _Size, tokens: Sequence[int], rows: RowArrays, head: HeadRows | None) -> Ints:
    """Returns a step in one array, as `_step` cuts it."""
    count = size.num_rows
    placed = packed_rows(rows, count)
    by_row, slots = placed[: num_packed(count)], placed[num_packed(count) :]
    parts = [_padded(tokens, count), by_row]
    if head is not None:
        if size.reading is _Reading.SOME_ROWS:
            num_rows = len(tokens)
            # Lagging rows have their place after the padding.
            source_H = np.where(
                head.source_H < num_rows, head.source_H, head.source_H + (count - num_rows)
            )
            by_read_row = packed_rows(head.rows, 2 * count)[: num_packed(2 * count)]
            parts += [_padded(source_H, 2 * count), by_read_row, _padded(head.last_G, count)]
        parts.append(packed_noise(head.divisors, head.words_G3, num_padded=count))
    return np.concatenate([*parts, slots])


def _padded(values: Sequence[int] | Ints, count: int) -> Ints:
    padded = np.zeros(count, np.int32)
    padded[: len(values)] = values
    return padded
