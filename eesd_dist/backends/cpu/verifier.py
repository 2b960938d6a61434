"""Verifies rounds in one compiled call, for a stage on CPUs of one host."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.api import Verified
from eesd_dist.backends.cpu.calls import call_in_threads, threads_for
from eesd_dist.backends.cpu.kernels.choosing import (
    NO_MASKS,
    Choices,
    Masks,
    MemoryByThreads,
    masks_of,
    new_choices,
)
from eesd_dist.backends.cpu.kernels.sources import Source, source_of
from eesd_dist.backends.cpu.kernels.verify import verify_kernel
from eesd_dist.backends.cpu.layers import CompiledLayers
from eesd_dist.backends.cpu.normed_product import NormedProduct
from eesd_dist.model.attention.rows import RowSegment, row_arrays
from eesd_dist.model.kv_layout import NO_ROWS, RowArrays
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.noise import mixed_seed
from eesd_dist.sampling.row_rules import positions_after
from eesd_dist.transport.contracts import Segment


# Shapes: T rows, D hidden channels, S sampled rows.
class Verifier:
    """Layers [N, L), LM head and rule of one rank as one kernel. One call at a time; every rank of
    a group makes the same calls."""

    has_masks = True

    @property
    def has_filters(self) -> bool:
        return self._layers.group.size == 1

    def __init__(self, layers: CompiledLayers, head: NormedProduct, *, vocab_start: int) -> None:
        """`vocab_start`: the token of the head's first column."""
        self._layers = layers
        self._head = head
        self._lm_head = head.call
        columns = range(vocab_start, vocab_start + head.product.num_out)
        self._ids_V = np.array(columns, dtype=np.int32)
        self._memory = MemoryByThreads(len(self._ids_V))
        nothing = source_of(torch.zeros(0, layers.hidden_size))
        self._run(nothing, NO_ROWS, new_choices(0, with_gaps=False), NO_MASKS)  # compiles

    @classmethod
    def of(cls, span: LlamaSpan) -> Self | None:
        """Returns None for a stage that has no such kernel: products that are not compiled, capped
        logits, a rank without tokens."""
        layers = span.paged.fused
        head = None if span.logits_head is None else span.logits_head.fused
        if not (isinstance(layers, CompiledLayers) and isinstance(head, NormedProduct)):
            return None
        if layers.kind.dtype != head.product.kind or span.spec.vocab_size < layers.group.size:
            return None
        return cls(layers, head, vocab_start=span.vocab_start)

    def verify(
        self, segments: Sequence[Segment], hidden_TD: Tensor, open_rows: Sequence[int]
    ) -> Verified | None:
        """Implements `RoundVerifier`; None if the ranks sum by messages. Raises PeerLost."""
        if not self._layers.needs_no_messages:
            return None
        if hidden_TD.dtype != torch.float32 or hidden_TD.stride(1) != 1:
            hidden_TD = hidden_TD.to(torch.float32, memory_format=torch.contiguous_format)
        rows = row_arrays(
            [
                RowSegment(start=s.start, num_rows=s.num_rows, pages=s.pages, parents=s.parents)
                for s in segments
            ]
        )
        choices = new_choices(
            sum(s.num_sampled for s in segments),
            with_gaps=False,
            open_shape=(len(open_rows), len(self._ids_V)),
        )
        choices.open_S[list(open_rows)] = range(len(open_rows))
        at = end_row = num_masks = 0
        for segment in segments:
            end_row += segment.num_rows
            end, count = at + segment.num_sampled, segment.num_sampled
            if count:
                temperature = segment.params.noise_temperature
                choices.rows_S[at:end] = range(end_row - count, end_row)
                choices.positions_S[at:end] = positions_after(segment)[-count:]
                choices.divisors_S[at:end] = temperature
                choices.filters.fill(slice(at, end), segment.params)
                if segment.masks:
                    choices.masks_S[at:end] = range(num_masks, num_masks + count)
                    num_masks += count
                if temperature:
                    choices.mixed_seeds_S[at:end] = mixed_seed(segment.params.seed)
            at = end
        masks_MU = masks_of([segment.masks for segment in segments], count=num_masks)
        self._run(source_of(hidden_TD), rows, choices, masks_MU)
        return Verified(choices.tokens_S, open_rows, torch.from_numpy(choices.logits_OV))

    def _run(self, source: Source, rows: RowArrays, choices: Choices, masks_MU: Masks) -> None:
        num_rows = len(rows.position_R)
        num_threads = threads_for(num_rows * self._layers.products_per_row)
        call_in_threads(
            verify_kernel(),
            num_threads,
            self._layers.kind,
            self._layers.call_over(num_rows),
            self._lm_head,
            self._ids_V,
            self._memory.of(num_threads),
            rows,
            source,
            choices,
            masks_MU,
        )
        if num_rows:  # else another thread may sum now
            self._layers.finish_sums()
