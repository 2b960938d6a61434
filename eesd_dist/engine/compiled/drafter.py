"""Drafts a round in one compiled call, for a stage of one rank on a CPU."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from eesd_dist.control.chain_rule import ChainReport, ChainRule
from eesd_dist.engine.compiled.choosing import Memory, new_choices, new_memory
from eesd_dist.engine.compiled.draft_kernel import (
    LOOKED,
    NUM_COUNTS,
    NUM_DRAFTED,
    NUM_GUESSES,
    NUM_LOOKS,
    NUM_NUMBERS,
    NUM_SUMS,
    NUM_WORK_COUNTS,
    PROBED,
    SPENT,
    Batch,
    Drafted,
    Rules,
    Stage,
    Work,
    draft_kernel,
)
from eesd_dist.engine.row_slices import RowSlice
from eesd_dist.model.attention.rows import RowSegment, row_arrays
from eesd_dist.model.cpu.calls import call_in_threads, threads_for
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kv_layout import NO_ROWS
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.noise import mixed_seed


# Shapes: T known rows, N rows in the results, D padded hidden channels.
class ChainStart(NamedTuple):
    """One request of a round: its known rows, and how to draft after them."""

    tokens: Sequence[int]
    """Of the known rows."""
    segment: RowSegment
    """The known rows."""
    most: int
    """Tokens to draft at most; 0: the exit head does not run, and the rest has no meaning."""
    rule: ChainRule
    lagging: Sequence[RowSlice] = ()
    """The head's inputs of the rows before the known ones that it has not read yet."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0


class DraftedChain(NamedTuple):
    """One request's results."""

    rows_TD: RowSlice
    """The known rows, and one of each drafted token."""
    tokens: list[int]
    """The drafted tokens; after them the guess that ended the draft, if one did."""
    gaps: list[float]
    """Score gap of each of them."""
    report: ChainReport


class RoundDrafter:
    """Layers [0, N) and the exit head of one rank as one kernel. One call at a time."""

    def __init__(self, span: LlamaSpan, head: ExitHead) -> None:
        layers, head_layer = span.paged.compiled, head.paged.compiled
        lm_head, embedding_VD = head.logits_head.compiled, span.embedding
        assert layers is not None
        assert head_layer is not None
        assert lm_head is not None
        assert embedding_VD is not None
        self._layers, self._head_layer, self._lm_head = layers, head_layer, lm_head
        self._embedding_VD = embedding_VD.detach().contiguous()
        self._embedding_bytes = self._embedding_VD.stride(0) * self._embedding_VD.itemsize
        num_tokens = lm_head.product.num_out
        ids_V = torch.arange(num_tokens) if head.vocab_ids is None else head.vocab_ids
        self._ids_V = ids_V.to(torch.int32).numpy().copy()
        self._memory_of: dict[int, Memory] = {}
        """By number of threads."""
        self.draft([])  # compiles

    @classmethod
    def of(cls, span: LlamaSpan, head: ExitHead) -> Self | None:
        """Returns None for a stage that has no such kernel: products that are not compiled, parts
        of a head, a head that reads the embedding or caps its logits, float16."""
        layers, head_layer = span.paged.compiled, head.paged.compiled
        lm_head, embedding_VD = head.logits_head.compiled, span.embedding
        if layers is None or head_layer is None or lm_head is None or embedding_VD is None:
            return None
        fits = (
            layers.is_alone
            and head_layer.is_alone
            and not head.reads_embedding
            and layers.kind.dtype == head_layer.kind.dtype == lm_head.product.kind
            and embedding_VD.dtype in (torch.float32, torch.bfloat16)
            and lm_head.product.num_out >= 2
        )
        return cls(span, head) if fits else None

    def draft(self, chains: Sequence[ChainStart]) -> tuple[Tensor, list[DraftedChain]]:
        """Runs all known rows, and drafts after them. Returns the rows [T, D] after the layers,
        request by request, and each request's results."""
        batch, most_read = self._batch(chains)
        num_known, num = len(batch.source_T), len(chains)
        num_rows, longest = num_known + int(batch.most_B.sum()), int(batch.most_B.max(initial=0))
        rows_ND = torch.empty(num_rows, self._layers.width)
        drafted = Drafted(
            rows_ND=rows_ND.numpy(),
            tokens_BK=np.empty((num, longest), np.int64),
            gaps_BK=np.empty((num, longest), np.float32),
            means_BK=np.empty((num, longest)),
            counts_BN=np.empty((num, NUM_COUNTS), np.int64),
            sums_BN=np.empty((num, NUM_SUMS)),
        )
        num_threads = threads_for(num_known * self._layers.products_per_row)
        call_in_threads(
            draft_kernel(),
            num_threads,
            self._layers.kind,
            self._stage(max(num_known, num), max(most_read, num), num_threads),
            batch,
            _rules(chains),
            drafted,
            _work(num, max(num_known, most_read, num)),
        )
        return self._results(chains, rows_ND, drafted)

    def _batch(self, chains: Sequence[ChainStart]) -> tuple[Batch, int]:
        """Returns the requests for the kernel, and how many rows the head may read at once."""
        lagging: list[int] = []
        num_lagging: list[int] = [0]
        most_read = 0
        for chain in chains:
            if chain.most:
                for piece in chain.lagging:
                    distance = piece.source.stride(0) * piece.source.itemsize
                    first = piece.source.data_ptr()
                    lagging.extend(first + at * distance for at in range(piece.first, piece.end))
                most_read += len(chain.tokens)
            num_lagging.append(len(lagging))
        num_known_B = np.array([len(chain.tokens) for chain in chains], np.int32)
        most_B = np.array([chain.most for chain in chains], np.int32)
        rooms_B = num_known_B + most_B
        tokens_T = np.array([token for chain in chains for token in chain.tokens], np.int64)
        batch = Batch(
            rows=row_arrays([chain.segment for chain in chains]) if chains else NO_ROWS,
            source_T=tokens_T * self._embedding_bytes + self._embedding_VD.data_ptr(),
            first_B=num_known_B.cumsum(dtype=np.int32) - num_known_B,
            place_B=rooms_B.cumsum(dtype=np.int32) - rooms_B,
            most_B=most_B,
            divisors_B=np.array([chain.temperature for chain in chains], np.float32),
            mixed_seeds_B=np.array(
                [mixed_seed(c.seed) if c.temperature else 0 for c in chains], np.uint64
            ),
            first_lagging_B=np.array(num_lagging, np.int32),
            lagging_L=np.array(lagging, np.int64),
        )
        return batch, most_read + len(lagging)

    def _stage(self, num_rows: int, num_read: int, num_threads: int) -> Stage:
        memory = self._memory_of.get(num_threads)
        if memory is None:
            memory = self._memory_of[num_threads] = new_memory(len(self._ids_V), num_threads)
        return Stage(
            layers=self._layers.call_over(num_rows),
            head=self._head_layer.call_over(num_read),
            lm_head=self._lm_head.call,
            ids_V=self._ids_V,
            memory=memory,
            embedding_at=self._embedding_VD.data_ptr(),
            embedding_bytes=self._embedding_bytes,
            num_channels=self._layers.hidden_size,
            is_bfloat16=self._embedding_VD.dtype == torch.bfloat16,
        )

    def _results(
        self, chains: Sequence[ChainStart], rows_ND: Tensor, drafted: Drafted
    ) -> tuple[Tensor, list[DraftedChain]]:
        counts: list[list[int]] = drafted.counts_BN.tolist()
        sums: list[list[float]] = drafted.sums_BN.tolist()
        num_rows = len(rows_ND) - sum(
            chain.most - count[NUM_DRAFTED] for chain, count in zip(chains, counts, strict=True)
        )
        rows_TD = rows_ND[:num_rows, : self._layers.hidden_size]
        found: list[DraftedChain] = []
        end = 0
        for b, (chain, count) in enumerate(zip(chains, counts, strict=True)):
            num_guesses = count[NUM_GUESSES]
            first, end = end, end + len(chain.tokens) + count[NUM_DRAFTED]
            report = ChainReport(
                means=tuple(drafted.means_BK[b, :num_guesses].tolist()),
                num_drafted=count[NUM_DRAFTED],
                num_looks=count[NUM_LOOKS],
                looked=sums[b][LOOKED],
                spent=sums[b][SPENT],
                probed=count[PROBED] > 0,
            )
            found.append(
                DraftedChain(
                    RowSlice(rows_TD, first, end),
                    drafted.tokens_BK[b, :num_guesses].tolist(),
                    drafted.gaps_BK[b, :num_guesses].tolist(),
                    report,
                )
            )
        return rows_TD, found


def _work(num_requests: int, num_rows: int) -> Work:
    return Work(
        source_M=np.empty(num_rows, np.int64),
        target_M=np.empty(num_rows, np.int64),
        table_M=np.empty(num_rows, np.int32),
        position_M=np.empty(num_rows, np.int32),
        in_order_M=np.empty(num_rows, np.int32),
        zeros_M=np.zeros(num_rows, np.int32),
        alive_B=np.empty(num_requests, np.int32),
        choices=new_choices(num_requests, with_gaps=True),
        counts=np.zeros(NUM_WORK_COUNTS, np.int64),
    )


def _rules(chains: Sequence[ChainStart]) -> Rules:
    """Returns the rules; requests share prices and curves that are the same arrays."""
    prices = {id(chain.rule.prices): chain.rule.prices for chain in chains}
    curves = {id(chain.rule.odds.curve): chain.rule.odds.curve for chain in chains}
    price_at = {name: at for at, name in enumerate(prices)}
    curve_at = {name: at for at, name in enumerate(curves)}
    numbers_BN = np.empty((len(chains), NUM_NUMBERS))
    for b, chain in enumerate(chains):
        _, *before, odds, shift, deviation = chain.rule
        numbers_BN[b] = (*before, *odds[:4], shift, deviation)
    num_prices = [len(some) for some in prices.values()]
    num_points = [len(some) for some in curves.values()]
    prices_UK = np.zeros((len(prices), max(num_prices, default=0)))
    curves_CQ2 = np.zeros((len(curves), max(num_points, default=0), 2))
    for at, some in enumerate(prices.values()):
        prices_UK[at, : len(some)] = some
    for at, some in enumerate(curves.values()):
        curves_CQ2[at, : len(some)] = some
    return Rules(
        numbers_BN=numbers_BN,
        prices_UK=prices_UK,
        num_prices_U=np.array(num_prices, np.int32),
        prices_B=np.array([price_at[id(chain.rule.prices)] for chain in chains], np.int32),
        curves_CQ2=curves_CQ2,
        num_points_C=np.array(num_points, np.int32),
        curve_B=np.array([curve_at[id(chain.rule.odds.curve)] for chain in chains], np.int32),
    )
