"""One level of the drafts of several requests in one compiled call, on a CPU."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eesd_dist.engine.compiled.drafter import token_ids
from eesd_dist.engine.compiled.pass_kernel import Source
from eesd_dist.engine.compiled.row_pass import RowPass, new_choices
from eesd_dist.engine.row_slices import RowSlice
from eesd_dist.model.attention.rows import RowSegment, row_arrays
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kv_layout import NO_ROWS, RowArrays
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.noise import mixed_seed


# Shapes: A rows, D hidden channels.
class GuessAfter(NamedTuple):
    """Rows that the exit head reads, and how it guesses a token after the last of them."""

    segment: RowSegment
    inputs: Sequence[RowSlice]
    position: int
    """Of the token."""
    temperature: float
    """0: greedy."""
    seed: int


class LevelPass:
    """Layers [0, N) and the exit head of one rank as one kernel. One call at a time."""

    def __init__(self, span: LlamaSpan, head: ExitHead) -> None:
        """`fits_one_call` holds for the two."""
        layers, head_layer = span.paged.compiled, head.paged.compiled
        lm_head, embedding_VD = head.logits_head.compiled, span.embedding
        assert layers is not None
        assert head_layer is not None
        assert lm_head is not None
        assert embedding_VD is not None
        self._hidden_size, self._width = layers.hidden_size, layers.width
        self._embedding_VD = embedding_VD.detach().contiguous()
        self._pass = RowPass(
            layers, lm_head, ids_V=token_ids(head, lm_head.product.num_out), exit_head=head_layer
        )

    def new_rows(self, count: int) -> Tensor:
        """Returns memory [A, D] for the rows of one call. It is the caller's from then on."""
        return torch.empty(count, self._width)[:, : self._hidden_size]

    def run(
        self,
        tokens: Sequence[int],
        segments: Sequence[RowSegment],
        rows_AD: Tensor,
        guesses: Sequence[GuessAfter],
    ) -> tuple[list[int], list[float]]:
        """Runs a row of each token through the layers, into `rows_AD`, then those of the guesses
        through the head, which may be among them. Returns the guessed tokens and the score gap of
        each. Segments are chains."""
        choices = new_choices(len(guesses), with_gaps=True)
        end = 0
        for at, guess in enumerate(guesses):
            end += guess.segment.num_rows
            choices.rows_S[at] = end - 1
            choices.positions_S[at] = guess.position
            choices.divisors_S[at] = guess.temperature
            if guess.temperature:
                choices.mixed_seeds_S[at] = mixed_seed(guess.seed)
        read = [guess.segment for guess in guesses]
        rows = _arrays(segments)
        self._pass.run(
            rows,
            self._embedded(tokens),
            choices,
            into_TD=rows_AD,
            head_rows=rows if read == segments else _arrays(read),
            head_source=_inputs(guesses),
        )
        return choices.tokens_S.tolist(), choices.gaps_S.tolist()

    def _embedded(self, tokens: Sequence[int]) -> Source:
        embedding_VD = self._embedding_VD
        distance = embedding_VD.shape[1] * embedding_VD.itemsize
        at_A = np.array(tokens, np.int64) * distance + embedding_VD.data_ptr()
        return Source(at_A, embedding_VD.shape[1], embedding_VD.dtype == torch.bfloat16)


def _arrays(segments: Sequence[RowSegment]) -> RowArrays:
    return row_arrays(segments) if segments else NO_ROWS


def _inputs(guesses: Sequence[GuessAfter]) -> Source:
    addresses: list[int] = []
    num_channels = 0
    for guess in guesses:
        for rows in guess.inputs:
            source = rows.source
            distance = source.stride(0) * source.itemsize
            first, num_channels = source.data_ptr(), source.shape[1]
            addresses.extend(first + row * distance for row in range(rows.first, rows.end))
    return Source(np.array(addresses, np.int64), num_channels, False)
