"""Verifies rounds in one compiled call, for a stage of one rank on a CPU."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.engine.compiled.verify_kernel import NUM_ROWS, Choices, Memory, Source, verify_kernel
from eesd_dist.model.attention.rows import RowSegment, row_arrays
from eesd_dist.model.cpu.calls import call_in_threads, threads_for
from eesd_dist.model.cpu.packed import in_blocks
from eesd_dist.model.kv_layout import NO_ROWS, RowArrays
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.noise import mixed_seed
from eesd_dist.sampling.row_rules import noise_temperature, positions_after
from eesd_dist.transport.contracts import Segment

_FLOAT_BYTES = 4


# Shapes: T rows, D hidden channels, S sampled rows, V vocabulary.
class Verifier:
    """Layers [N, L), LM head and rule of one rank as one kernel. One call at a time."""

    def __init__(self, span: LlamaSpan) -> None:
        layers, head = span.paged.compiled, span.logits_head
        assert layers is not None
        assert head is not None
        assert head.compiled is not None
        self._layers = layers
        self._head = head.compiled
        self._lm_head = self._head.call
        self._ids_V = np.arange(self._head.product.num_out, dtype=np.int32)
        self._memory_of: dict[int, Memory] = {}
        """By number of threads."""
        self._run(torch.zeros(0, layers.hidden_size), NO_ROWS, _choices(0))  # compiles

    @classmethod
    def of(cls, span: LlamaSpan) -> Self | None:
        """Returns None for a stage that has no such kernel: products that are not compiled, a part
        of the layers, capped logits."""
        layers, head = span.paged.compiled, span.logits_head
        if layers is None or head is None or head.compiled is None:
            return None
        fits = layers.is_alone and layers.kind.dtype == head.compiled.product.kind
        return cls(span) if fits else None

    def verify(self, segments: Sequence[Segment], hidden_TD: Tensor) -> npt.NDArray[np.int32]:
        """Returns the target's token after each sampled row. Segments are chosen from among all
        tokens, by their score alone."""
        rows = row_arrays(
            [
                RowSegment(start=s.start, num_rows=s.num_rows, pages=s.pages, parents=s.parents)
                for s in segments
            ]
        )
        choices = _choices(sum(segment.num_sampled for segment in segments))
        at = end_row = 0
        for segment in segments:
            end_row += segment.num_rows
            end, count = at + segment.num_sampled, segment.num_sampled
            if count:
                temperature = noise_temperature(segment.temperature)
                choices.rows_S[at:end] = range(end_row - count, end_row)
                choices.positions_S[at:end] = positions_after(segment)[-count:]
                choices.divisors_S[at:end] = temperature
                if temperature:
                    choices.mixed_seeds_S[at:end] = mixed_seed(segment.seed)
            at = end
        self._run(hidden_TD, rows, choices)
        return choices.tokens_S

    def _run(self, hidden_TD: Tensor, rows: RowArrays, choices: Choices) -> None:
        if hidden_TD.dtype != torch.float32 or hidden_TD.stride(1) != 1:
            hidden_TD = hidden_TD.to(torch.float32, memory_format=torch.contiguous_format)
        source = Source(
            rows_at=hidden_TD.data_ptr(),
            row_bytes=hidden_TD.stride(0) * _FLOAT_BYTES,
            hidden_size=self._layers.hidden_size,
        )
        num_threads = threads_for(len(hidden_TD) * self._layers.products_per_row)
        call_in_threads(
            verify_kernel(),
            num_threads,
            self._layers.kind,
            self._layers.call_over(len(hidden_TD)),
            self._lm_head,
            self._ids_V,
            self._memory(num_threads),
            rows,
            source,
            choices,
        )

    def _memory(self, num_threads: int) -> Memory:
        known = self._memory_of.get(num_threads)
        if known is None:
            num_tokens = len(self._ids_V)
            wide = (num_threads, num_tokens)
            known = self._memory_of[num_threads] = Memory(
                logits_BW=np.zeros((NUM_ROWS, in_blocks(num_tokens)), np.float32),
                scores_PV=np.zeros(wide, np.float32),
                lost_PV=np.zeros(wide, np.float32),
                keys_PV=np.zeros(wide, np.int32),
                mantissas_PV=np.zeros(wide, np.int32),
                words_P3=np.zeros((num_threads, 3), np.uint32),
            )
        return known


def _choices(count: int) -> Choices:
    return Choices(
        rows_S=np.zeros(count, np.int32),
        divisors_S=np.zeros(count, np.float32),
        mixed_seeds_S=np.zeros(count, np.uint64),
        positions_S=np.zeros(count, np.int32),
        tokens_S=np.zeros(count, np.int32),
    )
