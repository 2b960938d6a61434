"""Runs rows of any requests in one compiled call, for a stage of one rank on a CPU."""

import numpy as np
import torch
from torch import Tensor

from eesd_dist.engine.compiled.pass_kernel import (
    NUM_ROWS,
    Choices,
    Memory,
    Source,
    Step,
    pass_kernel,
)
from eesd_dist.model.cpu.calls import call_in_threads, threads_for
from eesd_dist.model.cpu.packed import in_blocks
from eesd_dist.model.kv_layout import NO_ROWS, Ints, RowArrays
from eesd_dist.model.layers.compiled_layers import CompiledLayers
from eesd_dist.model.layers.logits_head import NormedProduct

NO_SOURCE = Source(np.zeros(0, np.int64), 0, False)


# Shapes: T rows, D channels, S sampled rows, V vocabulary.
class RowPass:
    """Layers, or layers and an exit head, and an LM head as one kernel. One call at a time."""

    def __init__(
        self,
        layers: CompiledLayers,
        lm_head: NormedProduct,
        *,
        ids_V: Ints,
        exit_head: CompiledLayers | None = None,
    ) -> None:
        """`ids_V`: the token of each of the LM head's rows."""
        self._layers = layers
        self._exit_head = exit_head
        self._lm_head = lm_head
        self._ids_V = ids_V
        self._memory_of: dict[int, Memory] = {}
        """By number of threads."""
        self.run(NO_ROWS, NO_SOURCE, new_choices(0))  # compiles

    def run(
        self,
        rows: RowArrays,
        source: Source,
        choices: Choices,
        *,
        into_TD: Tensor | None = None,
        head_rows: RowArrays = NO_ROWS,
        head_source: Source = NO_SOURCE,
    ) -> None:
        """Runs the rows, and those of the exit head, and fills the choices after the last ones.

        `into_TD`: where rows after the layers are left, padded to a block; None: nowhere.
        """
        num_rows, num_head_rows = len(rows.position_R), len(head_rows.position_R)
        layers = self._layers.call_over(num_rows)
        if into_TD is not None:
            scratch = layers.scratch._replace(
                x=into_TD.data_ptr(), x_bytes=into_TD.stride(0) * into_TD.itemsize
            )
            layers = layers._replace(scratch=scratch)
        work = num_rows * self._layers.products_per_row
        head = layers
        if self._exit_head is not None:
            head = self._exit_head.call_over(num_head_rows)
            work += num_head_rows * self._exit_head.products_per_row
        num_threads = threads_for(work)
        steps = (
            Step(layers, rows, source),
            Step(head, head_rows, head_source),
        )
        call_in_threads(
            pass_kernel(),
            num_threads,
            self._layers.kind,
            steps,
            self._lm_head.call,
            self._ids_V,
            self._memory(num_threads),
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


def source_of(rows_TD: Tensor) -> Source:
    """Returns all rows of a tensor, float32 or bfloat16, as a source."""
    distance = rows_TD.stride(0) * rows_TD.itemsize
    at_T = rows_TD.data_ptr() + distance * np.arange(rows_TD.shape[0], dtype=np.int64)
    return Source(at_T, rows_TD.shape[1], rows_TD.dtype == torch.bfloat16)


def new_choices(count: int, *, with_gaps: bool = False) -> Choices:
    """Returns greedy choices after so many rows, to be filled."""
    return Choices(
        rows_S=np.zeros(count, np.int32),
        divisors_S=np.zeros(count, np.float32),
        mixed_seeds_S=np.zeros(count, np.uint64),
        positions_S=np.zeros(count, np.int32),
        tokens_S=np.zeros(count, np.int32),
        gaps_S=np.zeros(count if with_gaps else 0, np.float32),
    )
