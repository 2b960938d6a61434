"""Drafts one request's chain in one compiled call, for a stage of one rank on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

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
from eesd_dist.engine.row_slices import RowSlice
from eesd_dist.model.attention.rows import one_table
from eesd_dist.model.cpu.calls import call_in_threads, threads_for
from eesd_dist.model.cpu.packed import in_blocks
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kv_layout import Ints
from eesd_dist.model.span import LlamaSpan
from eesd_dist.page_table import NO_PAGES, PageTable
from eesd_dist.sampling.compiled_rule import Floats
from eesd_dist.sampling.noise import mixed_seed

MOST_LAGGING = 32
"""Rows that the exit head may lag behind at the start of a chain."""
LONGEST = 256
"""Tokens in a chain."""
_FLOAT_BYTES = 4


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


class ChainDrafter:
    """Layers [0, N) and the exit head of one rank as one kernel. One call at a time."""

    def __init__(self, span: LlamaSpan, head: ExitHead, *, most_given: int) -> None:
        """`fits_one_call` holds for the two. `most_given`: maximum tokens of a draft that is known
        already."""
        layers, head_layer = span.paged.compiled, head.paged.compiled
        lm_head, embedding_VD = head.logits_head.compiled, span.embedding
        assert layers is not None
        assert head_layer is not None
        assert lm_head is not None
        assert embedding_VD is not None
        num_tokens = lm_head.product.num_out
        self._hidden_size, self._width = layers.hidden_size, layers.width
        self._kind = layers.kind
        self._owned = (lm_head, embedding_VD)
        layers_call, self._memory = layers.call(1 + most_given)
        head_call, self._head_memory = head_layer.call(MOST_LAGGING + 1)
        self._stage = Stage(
            layers=layers_call,
            head=head_call,
            hidden_bytes=self._hidden_size * _FLOAT_BYTES,
            positions_P=np.zeros(MOST_LAGGING + LONGEST + 2, np.int32),
            zeros_P=np.zeros(MOST_LAGGING + LONGEST + 2, np.int32),
            no_slots=np.zeros(0, np.int32),
            lm_head=lm_head.call,
            embedding_VD=_bits(embedding_VD),
            ids_V=token_ids(head, num_tokens),
            logits_V=np.zeros(in_blocks(num_tokens), np.float32),
            scores_V=np.zeros(num_tokens, np.float32),
            lost_V=np.zeros(num_tokens, np.float32),
            keys_V=np.zeros(num_tokens, np.int32),
            mantissas_V=np.zeros(num_tokens, np.int32),
            words_3=np.zeros(3, np.uint32),
        )
        self._tokens_K1 = np.zeros(LONGEST + 1, np.int64)
        self._gaps_K = np.zeros(LONGEST, np.float32)
        self._means_K = np.zeros(LONGEST)
        self._counts = np.zeros(NUM_COUNTS, np.int64)
        self._sums = np.zeros(NUM_SUMS)
        nothing = np.zeros((0, self._width), np.float32)
        self._num_threads = 1
        self._run(_chain(NO_PAGES, position=0, most=-1), of_length(0), nothing)  # compiles
        self._num_threads = threads_for(layers.products_per_row)

    def draft(
        self,
        token: int,
        *,
        given: Sequence[int] = (),
        at: int,
        pages: PageTable,
        lagging: RowSlice | None,
        rule: ChainRule,
        most: int,
        seed: int,
        temperature: float,
    ) -> DraftedChain:
        """Runs a token at position `at`, and drafts at most `most` tokens after it.

        `given`: tokens after it, at most `most_given`, that are drafted instead of the exit head's.
        `lagging`: the head's inputs of the rows before it that the head has not read yet, at most
        MOST_LAGGING; None: there are none. `temperature`: 0 for a greedy choice.
        """
        num_given = len(given)
        most = num_given or min(most, LONGEST)
        self._tokens_K1[0] = token
        self._tokens_K1[1 : 1 + num_given] = given
        hidden_KD = np.empty((most + 1, self._width), np.float32)
        chain = _chain(pages, position=at, most=most)._replace(
            num_given=num_given,
            divisor=np.float32(temperature),
            mixed_seed=np.uint64(mixed_seed(seed) if temperature else 0),
        )
        if lagging is not None:
            chain = _with_lagging(chain, lagging)
        self._run(chain, rule, hidden_KD)
        return self._results(hidden_KD, num_given)

    def _run(self, chain: Chain, rule: ChainRule, hidden_KD: Floats) -> None:
        drafted = Drafted(
            tokens_K1=self._tokens_K1,
            hidden_KD=hidden_KD,
            gaps_K=self._gaps_K,
            means_K=self._means_K,
            counts=self._counts,
            sums=self._sums,
        )
        call_in_threads(
            chain_kernel(), self._num_threads, self._kind, self._stage, chain, rule, drafted
        )

    def _results(self, hidden_KD: Floats, num_given: int) -> DraftedChain:
        counts: list[int] = self._counts.tolist()
        num_drafted, num_guesses = counts[NUM_DRAFTED], counts[NUM_GUESSES]
        report = ChainReport(
            means=tuple(self._means_K[:num_guesses].tolist()),
            num_drafted=num_drafted,
            num_looks=counts[NUM_LOOKS],
            looked=float(self._sums[LOOKED]),
            spent=float(self._sums[SPENT]),
            probed=counts[PROBED] > 0,
        )
        return DraftedChain(
            hidden_TD=torch.from_numpy(
                hidden_KD[: num_drafted + num_given + 1, : self._hidden_size]
            ),
            tokens=self._tokens_K1[1 : num_guesses + 1].tolist(),
            gaps=self._gaps_K[:num_guesses].tolist(),
            report=report,
        )


def _chain(pages: PageTable, *, position: int, most: int) -> Chain:
    """Returns a greedy chain without rows that lag behind."""
    return Chain(
        tables_1W=one_table(pages),
        position=position,
        num_given=0,
        most=most,
        divisor=np.float32(0.0),
        mixed_seed=np.uint64(0),
        num_lagging=0,
        lagging_at=0,
        lagging_bytes=0,
    )


def _with_lagging(chain: Chain, lagging: RowSlice) -> Chain:
    source = lagging.source
    distance = source.stride(0) * _FLOAT_BYTES
    return chain._replace(
        num_lagging=lagging.count,
        lagging_at=source.data_ptr() + lagging.first * distance,
        lagging_bytes=distance,
    )


def _bits(embedding_VD: Tensor) -> npt.NDArray[np.generic]:
    if embedding_VD.dtype == torch.float32:
        return embedding_VD.detach().contiguous().numpy()
    return embedding_VD.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def fits_one_call(span: LlamaSpan, head: ExitHead) -> bool:
    """Returns False for a stage that has no such kernels: products that are not compiled, parts of
    a head, a head that reads the embedding or caps its logits, float16."""
    layers, head_layer = span.paged.compiled, head.paged.compiled
    lm_head, embedding_VD = head.logits_head.compiled, span.embedding
    if layers is None or head_layer is None or lm_head is None or embedding_VD is None:
        return False
    return (
        layers.is_alone
        and head_layer.is_alone
        and not head.reads_embedding
        and layers.kind.dtype == head_layer.kind.dtype == lm_head.product.kind
        and embedding_VD.dtype in (torch.float32, torch.bfloat16)
        and lm_head.product.num_out >= 2
    )


def token_ids(head: ExitHead, num_tokens: int) -> Ints:
    """Returns the token of each row of the head's LM head."""
    ids_V = torch.arange(num_tokens) if head.vocab_ids is None else head.vocab_ids
    return ids_V.to(torch.int32).numpy().copy()
