"""Drafts one request's chain in one compiled call, for a stage of one rank on a CPU."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.control.chain_rule import ChainReport, ChainRule, of_length
from eesd_dist.engine.compiled.draft_kernel import (
    LOOKED,
    NUM_COUNTS,
    NUM_DRAFTED,
    NUM_GUESSES,
    NUM_LOOKS,
    NUM_SUMS,
    PROBED,
    SPENT,
    Chain,
    Drafted,
    Stage,
    chain_kernel,
)
from eesd_dist.model.cpu.calls import call_in_threads, threads_for
from eesd_dist.model.cpu.packed import in_blocks
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan
from eesd_dist.page_table import NO_PAGES, PageTable
from eesd_dist.sampling.noise import mixed_seed

MOST_LAGGING = 32
"""Rows that the exit head may lag behind at the start of a chain."""
_FLOAT_BYTES = 4
_NO_SLOTS = np.zeros(0, np.int32)


# Shapes: T rows, M rows that the head has not read, D hidden channels, V draft vocabulary.
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedChain:
    """Results of one call."""

    hidden_TD: Tensor
    """The first token's row, and one of each drafted token."""
    tokens: list[int]
    """The drafted tokens; after them the guess that ended the draft, if one did."""
    gaps: list[float]
    """Score gap of each of them."""
    report: ChainReport

    @property
    def num_drafted(self) -> int:
        return self.report.num_drafted


class ChainDrafter:
    """Layers [0, N) and the exit head of one rank as one kernel. One call at a time."""

    def __init__(self, span: LlamaSpan, head: ExitHead) -> None:
        layers, head_layer = span.paged.compiled, head.paged.compiled
        lm_head, embedding_VD = head.logits_head.compiled, span.embedding_VD
        assert layers is not None
        assert head_layer is not None
        assert lm_head is not None
        assert embedding_VD is not None
        num_tokens = lm_head.product.num_out
        self._hidden_size, self._width = layers.hidden_size, layers.width
        self._kind = layers.kind
        self._owned = (lm_head, embedding_VD)
        layers_call, self._memory = layers.call(1)
        head_call, self._head_memory = head_layer.call(MOST_LAGGING + 1)
        size = (MOST_LAGGING + 1) * self._width * _FLOAT_BYTES
        head_rows = self._head_memory[:size].view(torch.float32).view(-1, self._width)
        self._lagging_MD = head_rows[:, : self._hidden_size]
        ids_V = torch.arange(num_tokens) if head.vocab_ids is None else head.vocab_ids
        self._num_threads = threads_for(layers.products_per_row)
        self._stage = Stage(
            layers=layers_call,
            head=head_call,
            lm_head=lm_head.call,
            embedding_VD=_bits(embedding_VD),
            ids_V=ids_V.to(torch.int32).numpy().copy(),
            logits_V=np.zeros(in_blocks(num_tokens), np.float32),
            scores_V=np.zeros(num_tokens, np.float32),
            lost_V=np.zeros(num_tokens, np.float32),
            keys_V=np.zeros(num_tokens, np.int32),
            mantissas_V=np.zeros(num_tokens, np.int32),
            words_3=np.zeros(3, np.uint32),
        )
        self._get_ready()

    @classmethod
    def of(cls, span: LlamaSpan, head: ExitHead) -> Self | None:
        """Returns None for a stage that has no such kernel: products that are not compiled, parts
        of a head, a head that reads the embedding or caps its logits, float16."""
        layers, head_layer = span.paged.compiled, head.paged.compiled
        lm_head, embedding_VD = head.logits_head.compiled, span.embedding_VD
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

    def draft(
        self,
        token: int,
        *,
        at: int,
        pages: PageTable,
        lagging_MD: Tensor | None,
        rule: ChainRule,
        most: int,
        seed: int,
        temperature: float,
    ) -> DraftedChain:
        """Runs a token at position `at`, and drafts at most `most` tokens after it.

        `lagging_MD`: the head's inputs of the rows before it that the head has not read yet, at
        most MOST_LAGGING; None: there are none. `temperature`: 0 for a greedy choice.
        """
        num_lagging = 0
        if lagging_MD is not None:
            num_lagging = lagging_MD.shape[0]
            self._lagging_MD[:num_lagging] = lagging_MD
        positions_P = np.arange(at - num_lagging, at + most + 2, dtype=np.int32)
        chain = Chain(
            tables_1W=np.array(pages.array, ndmin=2),
            positions_P=positions_P,
            zeros_P=np.zeros_like(positions_P),
            no_slots=_NO_SLOTS,
            most=most,
            divisor=np.float32(temperature),
            mixed_seed=np.uint64(mixed_seed(seed) if temperature else 0),
            num_lagging=num_lagging,
        )
        hidden_TD = torch.empty(most + 1, self._width)
        drafted = Drafted(
            tokens_K1=np.array([token] * (most + 1), np.int64),
            hidden_at=hidden_TD.data_ptr(),
            gaps_K=np.empty(most, np.float32),
            means_K=np.empty(most),
            counts=np.zeros(NUM_COUNTS, np.int64),
            sums=np.zeros(NUM_SUMS),
        )
        self._run(chain, rule, drafted)
        return self._results(hidden_TD, drafted)

    def _run(self, chain: Chain, rule: ChainRule, drafted: Drafted) -> None:
        call_in_threads(
            chain_kernel(), self._num_threads, self._kind, self._stage, chain, rule, drafted
        )

    def _results(self, hidden_TD: Tensor, drafted: Drafted) -> DraftedChain:
        counts: list[int] = drafted.counts.tolist()
        looked, spent = drafted.sums.tolist()
        num_drafted, num_guesses = counts[NUM_DRAFTED], counts[NUM_GUESSES]
        report = ChainReport(
            means=tuple(drafted.means_K[:num_guesses].tolist()),
            num_drafted=num_drafted,
            num_looks=counts[NUM_LOOKS],
            looked=looked,
            spent=spent,
            probed=counts[PROBED] > 0,
        )
        return DraftedChain(
            hidden_TD=hidden_TD[: num_drafted + 1, : self._hidden_size],
            tokens=drafted.tokens_K1[1 : num_guesses + 1].tolist(),
            gaps=drafted.gaps_K[:num_guesses].tolist(),
            report=report,
        )

    def _get_ready(self) -> None:
        """Compiles the kernel or loads it, so that no request waits for it: no token is run."""
        nothing = Drafted(
            tokens_K1=np.zeros(0, np.int64),
            hidden_at=0,
            gaps_K=np.zeros(0, np.float32),
            means_K=np.zeros(0),
            counts=np.zeros(NUM_COUNTS, np.int64),
            sums=np.zeros(NUM_SUMS),
        )
        chain = Chain(
            tables_1W=np.array(NO_PAGES.array, ndmin=2),
            positions_P=np.zeros(1, np.int32),
            zeros_P=np.zeros(1, np.int32),
            no_slots=_NO_SLOTS,
            most=-1,
            divisor=np.float32(0.0),
            mixed_seed=np.uint64(0),
            num_lagging=0,
        )
        self._run(chain, of_length(0), nothing)


def _bits(embedding_VD: Tensor) -> npt.NDArray[np.generic]:
    if embedding_VD.dtype == torch.float32:
        return embedding_VD.detach().contiguous().numpy()
    return embedding_VD.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
