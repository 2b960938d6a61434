"""Verifies rounds on a GPU: an upload, a CUDA graph, a copy to the host.

A graph has the layers, the LM head over the sampled rows and the choice by score, launched as they
are without it, so that a token is the same with and without one. Ranks of a group gather the best
tokens of their parts of the vocabulary. Logits of open rows are kept in memory that graphs share.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.backends.api import Verified
from eesd_dist.backends.cuda.choice import (
    NUMBERS_PER_FILTER,
    best_two,
    packed_filters,
    packed_noise,
)
from eesd_dist.backends.cuda.graphs import Graphs
from eesd_dist.backends.cuda.layers import GRAPH_ROWS, CudaLayers
from eesd_dist.backends.cuda.tiles import DeviceRows, Tiling, num_packed, packed_rows
from eesd_dist.backends.cuda.uploads import uploaded
from eesd_dist.model.attention.rows import RowSegment, row_arrays
from eesd_dist.model.kv_layout import Ints
from eesd_dist.model.layers.logits_head import LogitsHead
from eesd_dist.model.parallel import rank_range
from eesd_dist.model.rank_memory import logits_block
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.noise import key_words, noise_key
from eesd_dist.sampling.row_filters import NO_FILTER, RowFilters, filter_of, filters_by_row
from eesd_dist.sampling.row_rules import positions_after
from eesd_dist.transport.contracts import Segment


# Shapes: T rows, D hidden channels, S sampled rows, O open ones, G ranks, V columns of a rank.
class _Size(NamedTuple):
    """Key of a graph; row counts include padding."""

    num_rows: int
    num_sampled: int
    tiling: Tiling
    has_filters: bool
    keeps_logits: bool
    """True for open rows, and where filters may leave no candidate of a row."""


class GraphVerifier:
    """Layers [N, L), LM head and rule as CUDA graphs. One call at a time; every rank of a group
    makes the same calls."""

    has_masks = False

    def __init__(self, span: LlamaSpan, layers: CudaLayers, head: LogitsHead) -> None:
        self._layers, self._head = layers, head
        device = span.paged.device
        self._group = layers.group
        self._graphs: Graphs[_Size, Tensor] = Graphs(device, name="verifying", group=self._group)
        self._rows_TD = torch.zeros(
            GRAPH_ROWS[-1], span.spec.hidden_size, dtype=span.compute_dtype, device=device
        )
        self._max_sampled = logits_block(span.spec.vocab_size)
        """Their logits have this memory in a pass without a graph, too."""
        self._logits_SV: Tensor | None = None
        """Logits of the latest graph that keeps them."""
        self._ids_V: Tensor | None = None
        """Tokens of the columns; None where a column is its token."""
        columns = rank_range(span.spec.vocab_size, self._group.rank, self._group.size)
        self._num_columns = len(columns)
        if self._group.size > 1:
            self._ids_V = torch.arange(
                columns.start, columns.stop, dtype=torch.int32, device=device
            )

    @property
    def has_filters(self) -> bool:
        return self._group.size == 1

    @classmethod
    def of(cls, span: LlamaSpan) -> Self | None:
        """Returns None for a stage on a CPU, or with less than two tokens a rank."""
        layers, head = span.paged.fused, span.logits_head
        if head is None or not isinstance(layers, CudaLayers):
            return None
        if span.spec.vocab_size < 2 * layers.group.size:
            return None
        return cls(span, layers, head)

    def verify(
        self, segments: Sequence[Segment], hidden_TD: Tensor, open_rows: Sequence[int]
    ) -> Verified | None:
        """Implements `RoundVerifier`; None for a pass without a graph."""
        sampled = [segment for segment in segments if segment.num_sampled]
        num_rows, num_sampled = len(hidden_TD), sum(s.num_sampled for s in sampled)
        if not (num_sampled and self._layers.has_graphs(num_rows)):
            return None
        if _padded(num_sampled) > self._max_sampled:
            return None
        arrays = row_arrays(
            [
                RowSegment(start=s.start, num_rows=s.num_rows, pages=s.pages, parents=s.parents)
                for s in segments
            ]
        )
        tiles = self._layers.tiles(arrays)
        filters = self._filters(sampled, open_rows)
        size = _Size(
            _padded(num_rows),
            _padded(num_sampled),
            tiles.tiling,
            has_filters=filters is not None,
            keeps_logits=bool(open_rows) or filters is not None,
        )
        if size.keeps_logits and self._logits_SV is None:
            shape = min(self._max_sampled, GRAPH_ROWS[-1]), self._num_columns
            self._logits_SV = torch.empty(shape, device=self._rows_TD.device)
        source_S = np.zeros(size.num_sampled, np.int32)
        source_S[:num_sampled] = _sampled_rows(segments)
        packed = [source_S, _noise(sampled, num_padded=size.num_sampled)]
        if filters is not None:
            packed.append(packed_filters(filters, num_padded=size.num_sampled))
        packed.append(packed_rows(arrays, tiles, size.num_rows))
        self._graphs.upload(np.concatenate(packed))
        self._rows_TD.narrow(0, 0, num_rows).copy_(hidden_TD)
        best_GS4 = self._graphs.run(size, lambda: self._pass(size))
        tokens_S = np.zeros(num_sampled, np.int32)
        if len(open_rows) < num_sampled:
            tokens_S, is_decided_S = _best_tokens(best_GS4.narrow(1, 0, num_sampled).cpu().numpy())
            if not is_decided_S.all():
                open_rows = sorted({*open_rows, *np.flatnonzero(~is_decided_S).tolist()})
        if not open_rows:
            return Verified(tokens_S, open_rows, self._rows_TD.new_empty(0, 0))
        assert self._logits_SV is not None, "allocated for this pass"
        at_O = uploaded(open_rows, self._logits_SV.device)
        return Verified(tokens_S, open_rows, self._logits_SV.index_select(0, at_O))

    def _filters(self, sampled: Sequence[Segment], open_rows: Sequence[int]) -> RowFilters | None:
        """Returns the filters of the sampled rows that are not open; None without any."""
        if not (self.has_filters and any(s.params.is_filtered for s in sampled)):
            return None
        row_params = [s.params for s in sampled for _ in range(s.num_sampled)]
        decided = set(range(len(row_params))).difference(open_rows)
        return filters_by_row(
            [
                filter_of(params) if row in decided else NO_FILTER
                for row, params in enumerate(row_params)
            ]
        )

    def _pass(self, size: _Size) -> Tensor:
        """Launches the kernels over what is in the buffers. Returns each rank's `best_two`,
        [G, S, 4]."""
        numbers = self._graphs.numbers
        num_filters = NUMBERS_PER_FILTER * size.num_sampled if size.has_filters else 0
        lengths = [size.num_sampled, 4 * size.num_sampled, num_filters]
        source_S, noise, filters_S4, packed = torch.split(
            numbers, [*lengths, len(numbers) - sum(lengths)]
        )
        end = num_packed(size.num_rows, size.tiling.num_tiles)
        rows = DeviceRows(packed[:end], size.num_rows, size.tiling, slots=packed[end:])
        hidden_TD = self._layers.run(self._rows_TD.narrow(0, 0, size.num_rows).clone(), rows)
        logits_SV = self._head(hidden_TD.index_select(0, source_S))
        if size.keeps_logits:
            assert self._logits_SV is not None, "allocated before"
            self._logits_SV.narrow(0, 0, size.num_sampled).copy_(logits_SV)
        filters = filters_S4 if size.has_filters else None
        best_S4 = best_two(logits_SV, noise, self._ids_V, filters)
        if self._group.size == 1:
            return best_S4.unsqueeze(0)
        return torch.stack(self._group.all_gather(best_S4))


def _best_tokens(best_GS4: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Returns the token of the best score of all ranks, of equal ones the first: ranks are in the
    order of their tokens; and whether the choice has found it."""
    scores_GS = np.ascontiguousarray(best_GS4[:, :, 2]).view(np.float32)
    tokens_S: Ints = best_GS4[scores_GS.argmax(axis=0), np.arange(best_GS4.shape[1]), 0]
    is_decided_S = np.logical_not(np.isnan(scores_GS[0]))  # only one rank has filters
    return tokens_S, is_decided_S


def _padded(count: int) -> int:
    padded: int = next(padded for padded in GRAPH_ROWS if padded >= count)
    return padded


def _sampled_rows(segments: Sequence[Segment]) -> list[int]:
    rows: list[int] = []
    end = 0
    for segment in segments:
        end += segment.num_rows
        rows.extend(range(end - segment.num_sampled, end))
    return rows


def _noise(segments: Sequence[Segment], *, num_padded: int) -> Ints:
    """Returns `packed_noise` of the sampled rows."""
    divisors: list[float] = []
    keys: list[int] = []
    for segment in segments:
        count, temperature = segment.num_sampled, segment.params.noise_temperature
        divisors += [temperature] * count
        if temperature:
            keys += [noise_key(segment.params.seed, at) for at in positions_after(segment)[-count:]]
        else:
            keys += [0] * count
    return packed_noise(divisors, key_words(keys), num_padded=num_padded)
