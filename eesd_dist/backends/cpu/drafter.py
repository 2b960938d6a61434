"""Drafts a round in one compiled call, for a stage on CPUs of one host."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.api import ChainStart, DraftedChain
from eesd_dist.backends.cpu.calls import call_in_threads, threads_for
from eesd_dist.backends.cpu.kernels.choosing import MemoryByThreads, masks_of, new_choices
from eesd_dist.backends.cpu.kernels.draft import (
    NUM_COUNTS,
    NUM_DRAFTED,
    NUM_SUMS,
    NUM_WORK_COUNTS,
    Batch,
    Drafted,
    Rules,
    Stage,
    Work,
    draft_kernel,
)
from eesd_dist.backends.cpu.layers import CompiledLayers
from eesd_dist.backends.cpu.normed_product import NormedProduct
from eesd_dist.backends.row_slices import RowSlice
from eesd_dist.control.chain_rule import NUM_NUMBERS, ChainReport, Doubles, tables_of
from eesd_dist.model.attention.rows import row_arrays
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kv_layout import NO_ROWS
from eesd_dist.model.parallel import rank_range
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.noise import mixed_seed
from eesd_dist.sampling.row_filters import RowFilters, filters_by_row


# Shapes: T known rows, N rows in the results, D padded hidden channels.
class RoundDrafter:
    """Layers [0, N) and the exit head of one rank as one kernel. One call at a time; every rank of
    a group makes the same calls."""

    name = "compiled"
    has_masks = True

    def __init__(
        self,
        *,
        layers: CompiledLayers,
        head_layer: CompiledLayers,
        lm_head: NormedProduct,
        embedding_VD: Tensor,
        ids_V: Tensor,
    ) -> None:
        """`ids_V`: token of each column of the LM head."""
        self._layers, self._head_layer = layers, head_layer
        self._lm_head, self._owner = lm_head.call, lm_head
        self._embedding_VD = embedding_VD.detach().contiguous()
        self._embedding_bytes = self._embedding_VD.stride(0) * self._embedding_VD.itemsize
        self._ids_V = ids_V.to(torch.int32).numpy().copy()
        self._embedding_at = self._embedding_VD.data_ptr()
        self._drafted_memory, self._work_memory = _new_drafted(1, 1), _new_work(1, 1)
        self._memory = MemoryByThreads(len(self._ids_V))
        self.draft([])  # compiles

    @classmethod
    def of(cls, span: LlamaSpan, head: ExitHead) -> Self | None:
        """Returns None for a stage that has no such kernel: products that are not compiled, a head
        that caps its logits, float16, a rank without tokens."""
        layers, head_layer = span.paged.fused, head.paged.fused
        lm_head, embedding_VD = head.logits_head.fused, span.embedding
        if not (isinstance(layers, CompiledLayers) and isinstance(head_layer, CompiledLayers)):
            return None
        if not isinstance(lm_head, NormedProduct) or embedding_VD is None:
            return None
        fits = (
            layers.kind.dtype == head_layer.kind.dtype == lm_head.product.kind
            and embedding_VD.dtype in (torch.float32, torch.bfloat16)
            and head.vocab_size >= 2 * layers.group.size
        )
        if not fits:
            return None
        columns = rank_range(head.vocab_size, layers.group.rank, layers.group.size)
        ids_V = torch.arange(head.vocab_size) if head.vocab_ids is None else head.vocab_ids
        return cls(
            layers=layers,
            head_layer=head_layer,
            lm_head=lm_head,
            embedding_VD=embedding_VD,
            ids_V=ids_V[columns.start : columns.stop],
        )

    @property
    def has_filters(self) -> bool:
        return self._layers.group.size == 1

    @property
    def is_usable(self) -> bool:
        return self._layers.needs_no_messages

    def draft(self, chains: Sequence[ChainStart]) -> tuple[Tensor, list[DraftedChain]]:
        """Runs all known rows, and drafts after them. Returns the rows [T, D] after the layers,
        request by request, and each request's results."""
        batch, num_rows, max_read = self._batch(chains)
        num_committed, num = len(batch.source_T), len(chains)
        longest = max([chain.max_draft for chain in chains], default=0)
        rows_ND = torch.empty(num_rows, self._layers.width)
        drafted = self._drafted(num, longest)._replace(rows_ND=rows_ND.numpy())
        num_threads = threads_for(num_committed * self._layers.products_per_row)
        call_in_threads(
            draft_kernel(),
            num_threads,
            self._layers.kind,
            self._stage(max(num_committed, num), max(max_read, num), num_threads),
            batch,
            _rules(chains) if longest else _NO_RULES,
            drafted,
            self._work(num, max(num_committed, max_read, num)),
        )
        if chains:  # else another thread may sum now
            self._layers.finish_sums()
        return self._results(chains, rows_ND, drafted)

    def _batch(self, chains: Sequence[ChainStart]) -> tuple[Batch, int, int]:
        """Returns the requests for the kernel, the rows of the results with their gaps, and how
        many rows the head may read at once."""
        embedding_at, embedding_bytes = self._embedding_at, self._embedding_bytes
        source: list[int] = []
        lagging: list[int] = []
        first_B, offset_B, max_draft_B, lagging_B = [0], [0], [], [0]
        masks: list[bytes] = []
        masks_B = np.full(len(chains), -1, np.int32)
        max_read = 0
        for b, (tokens, _, max_draft, _, unread, _, _, mask, _) in enumerate(chains):
            source += [embedding_at + token * embedding_bytes for token in tokens]
            if max_draft:
                for row_slice in unread:
                    distance = row_slice.source.stride(0) * row_slice.source.itemsize
                    first = row_slice.source.data_ptr()
                    lagging += [
                        first + at * distance for at in range(row_slice.first, row_slice.end)
                    ]
                max_read += len(tokens)
            if mask:
                masks_B[b] = len(masks)
                masks.append(mask)
            max_draft_B.append(max_draft)
            first_B.append(len(source))
            offset_B.append(offset_B[-1] + len(tokens) + max_draft)
            lagging_B.append(len(lagging))
        batch = Batch(
            rows=row_arrays([chain.segment for chain in chains]) if chains else NO_ROWS,
            source_T=np.array(source, np.int64),
            ints_4B=np.array([first_B, offset_B, [*max_draft_B, 0], lagging_B], np.int32),
            divisors_B=np.array([chain.temperature for chain in chains], np.float32),
            mixed_seeds_B=np.array(
                [mixed_seed(c.seed) if c.temperature else 0 for c in chains], np.uint64
            ),
            filters=filters_by_row([chain.filters for chain in chains])
            or RowFilters.none(len(chains)),
            lagging_L=np.array(lagging, np.int64),
            masks_B=masks_B,
            masks_MU=masks_of(masks, count=len(masks)),
        )
        return batch, offset_B[-1], max_read + len(lagging)

    def _drafted(self, num_requests: int, longest: int) -> Drafted:
        """Returns memory for the results of so many requests, without that of the rows."""
        memory = self._drafted_memory
        have_requests, have_longest = memory.tokens_BK.shape
        if have_requests < num_requests or have_longest < longest:
            memory = self._drafted_memory = _new_drafted(
                max(num_requests, have_requests), max(longest, have_longest)
            )
        return memory

    def _work(self, num_requests: int, num_rows: int) -> Work:
        work = self._work_memory
        have_requests, have_rows = len(work.alive_B), work.ints_4M.shape[1]
        if have_requests < num_requests or have_rows < num_rows:
            work = self._work_memory = _new_work(
                max(num_requests, have_requests), max(num_rows, have_rows)
            )
        return work

    def _stage(self, num_rows: int, num_read: int, num_threads: int) -> Stage:
        return Stage(
            layers=self._layers.call_over(num_rows),
            head=self._head_layer.call_over(num_read),
            lm_head=self._lm_head,
            ids_V=self._ids_V,
            memory=self._memory.of(num_threads),
            embedding_at=self._embedding_at,
            embedding_bytes=self._embedding_bytes,
            num_channels=self._layers.hidden_size,
            is_bfloat16=self._embedding_VD.dtype == torch.bfloat16,
        )

    def _results(
        self, chains: Sequence[ChainStart], rows_ND: Tensor, drafted: Drafted
    ) -> tuple[Tensor, list[DraftedChain]]:
        num, longest = len(chains), max([chain.max_draft for chain in chains], default=0)
        counts: list[list[int]] = drafted.counts_BN[:num].tolist()
        sums: list[list[float]] = drafted.sums_BN[:num].tolist()
        tokens: list[list[int]] = drafted.tokens_BK[:num, :longest].tolist()
        gaps: list[list[float]] = drafted.gaps_BK[:num, :longest].tolist()
        means: list[list[float]] = drafted.means_BK[:num, :longest].tolist()
        num_rows = sum(len(chain.tokens) for chain in chains)
        num_rows += sum(count[NUM_DRAFTED] for count in counts)
        rows_TD = rows_ND[:num_rows, : self._layers.hidden_size]
        results: list[DraftedChain] = []
        end = 0
        for b, chain in enumerate(chains):
            num_drafted, num_guesses, num_looks, probed, _ = counts[b]
            looked, spent, _, _ = sums[b]
            first, end = end, end + len(chain.tokens) + num_drafted
            report = ChainReport(
                tuple(means[b][:num_guesses]), num_drafted, num_looks, looked, spent, probed > 0
            )
            rows = RowSlice(rows_TD, first, end)
            results.append(
                DraftedChain(rows, tokens[b][:num_guesses], gaps[b][:num_guesses], report)
            )
        return rows_TD, results


def _new_drafted(num_requests: int, longest: int) -> Drafted:
    return Drafted(
        rows_ND=np.empty((0, 0), np.float32),
        tokens_BK=np.empty((num_requests, longest), np.int64),
        gaps_BK=np.empty((num_requests, longest), np.float32),
        means_BK=np.empty((num_requests, longest)),
        counts_BN=np.empty((num_requests, NUM_COUNTS), np.int64),
        sums_BN=np.empty((num_requests, NUM_SUMS)),
    )


def _new_work(num_requests: int, num_rows: int) -> Work:
    return Work(
        longs_2M=np.empty((2, num_rows), np.int64),
        ints_4M=np.zeros((4, num_rows), np.int32),
        alive_B=np.empty(num_requests, np.int32),
        choices=new_choices(num_requests, with_gaps=True),
        counts=np.zeros(NUM_WORK_COUNTS, np.int64),
    )


_NO_RULES = Rules(
    numbers_BN=np.zeros((0, NUM_NUMBERS)),
    prices_UK=np.zeros((0, 0)),
    curves_CQ2=np.zeros((0, 0, 2)),
    ints_B4=np.zeros((0, 4), np.int32),
)


def _rules(chains: Sequence[ChainStart]) -> Rules:
    tables = tables_of([chain.rule for chain in chains])
    ints_B4 = [
        (prices, len(tables.prices[prices]), curve, len(tables.curves[curve]))
        for prices, curve in tables.places
    ]
    return Rules(
        numbers_BN=np.array(tables.numbers, np.float64),
        prices_UK=_stacked(tables.prices),
        curves_CQ2=_stacked(tables.curves),
        ints_B4=np.array(ints_B4, np.int32),
    )


def _stacked(arrays: Sequence[Doubles]) -> Doubles:
    """Returns the arrays with zeros after the ends of the shorter ones."""
    if len(arrays) == 1:
        return arrays[0][np.newaxis]
    longest = max(map(len, arrays))
    stacked = np.zeros((len(arrays), longest, *arrays[0].shape[1:]))
    for at, some in enumerate(arrays):
        stacked[at, : len(some)] = some
    return stacked
