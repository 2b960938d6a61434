"""Drafts a round on a GPU, a level in one step.

Rules are followed on the host, to which a step's guesses are copied; every rank of a group decides
the same. Where a guess is taken in any case, the next step is queued before, with the tokens as the
GPU has them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from eesd_dist.backends.api import ChainStart, DraftedChain
from eesd_dist.backends.cuda.layers import CudaLayers
from eesd_dist.backends.cuda.steps import DraftSteps, HeadRows, QueuedStep
from eesd_dist.backends.row_slices import RowSlice, joined
from eesd_dist.control.chain_rule import Follower
from eesd_dist.model.attention.rows import chain_rows, row_arrays
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kv_layout import Ints
from eesd_dist.model.span import LlamaSpan
from eesd_dist.sampling.noise import key_words, noise_key
from eesd_dist.sampling.row_filters import RowFilters, filters_by_row
from eesd_dist.sampling.rule import score_gaps


# Shapes: T known rows, D hidden channels, B page tables, W pages of the longest one.
class GraphDrafter:
    """Layers [0, N) and the exit head, or one rank's part of them, as steps. One call at a time;
    every rank of a group makes the same calls."""

    name = "graph"
    has_masks = False
    is_usable = True

    def __init__(self, steps: DraftSteps) -> None:
        self._steps = steps

    @classmethod
    def of(cls, span: LlamaSpan, head: ExitHead) -> Self | None:
        """Returns None for a stage that drafts in other ways: parts of layers or of a head."""
        layers, head_layers = span.paged.fused, head.paged.fused
        if span.embedding is None:
            return None
        if not (isinstance(layers, CudaLayers) and isinstance(head_layers, CudaLayers)):
            return None
        fits = head.vocab_size >= 2 * layers.group.size
        return cls(DraftSteps(span, head, layers, head_layers)) if fits else None

    @property
    def has_filters(self) -> bool:
        return self._steps.has_filters

    @torch.inference_mode()
    def draft(self, chains: Sequence[ChainStart]) -> tuple[Tensor, list[DraftedChain]]:
        """Runs all known rows, and drafts after them. Returns the rows [T, D] after the layers,
        request by request, and each request's results."""
        growing = [_Chain(at, chain) for at, chain in enumerate(chains)]
        rows = row_arrays([chain.segment for chain in chains])
        guessing = [chain for chain in growing if chain.rule.wants_guess()]
        step = self._steps.queue(
            [token for chain in chains for token in chain.tokens],
            rows,
            _reading_first(growing, guessing, rows.tables_BW),
        )
        end = 0
        for chain in growing:
            first, end = end, end + chain.start.segment.num_rows
            chain.rows.append(RowSlice(step.hidden_TD, first, end))
        level = _Level(step, growing, guessing)
        while guessing:
            next_level = (
                self._queue_next(level, rows.tables_BW) if guessing == level.guessed else None
            )
            continuing = _append_guesses(guessing, level)
            if not continuing:
                break
            guessing = [chain for chain in continuing if chain.rule.wants_guess()]
            if next_level is None:
                tokens = [chain.tokens[-1] for chain in continuing]
                level = self._queue(tokens, continuing, guessing, rows.tables_BW)
            else:
                level = next_level
            places = {chain.at: row for row, chain in enumerate(level.members)}
            for chain in continuing:
                at = places[chain.at]
                chain.rows.append(RowSlice(level.step.hidden_TD, at, at + 1))
                chain.num_rows += 1
        rows_TD = joined([row_slice for chain in growing for row_slice in chain.rows])
        drafted: list[DraftedChain] = []
        end = 0
        for chain in growing:
            first, end = end, end + sum(row_slice.count for row_slice in chain.rows)
            slice_TD = RowSlice(rows_TD, first, end)
            drafted.append(DraftedChain(slice_TD, chain.tokens, chain.gaps, chain.rule.report()))
        return rows_TD, drafted

    def _queue_next(self, level: "_Level", tables_BW: Ints) -> "_Level | None":
        """Queues the next level before this one's guesses are known, as if all were taken; None if
        no rule is sure to take its guess, since the step may then be for nothing. Rows of guesses
        that are not taken are not read, and the next token at their position replaces them."""
        if not self._steps.may_queue_ahead(len(level.guessed)):
            return None
        if not any(chain.rule.takes_any for chain in level.guessed):
            return None
        guessing = [chain for chain in level.guessed if chain.rule.may_go_on()]
        assert level.step.best_G4 is not None
        return self._queue(level.step.best_G4[:, 0], level.guessed, guessing, tables_BW)

    def _queue(
        self,
        tokens: Sequence[int] | Tensor,
        chains: Sequence["_Chain"],
        guessing: Sequence["_Chain"],
        tables_BW: Ints,
    ) -> "_Level":
        """Queues a row of each chain, and guesses after those asked."""
        rows = chain_rows(
            tables_BW,
            _ints([chain.at for chain in chains]),
            _ints([chain.num_rows for chain in chains]),
        )
        reading = _reading_newest(chains, guessing, tables_BW)
        return _Level(self._steps.queue(tokens, rows, reading), chains, guessing)


class _Level(NamedTuple):
    """A step, the chains of its rows, and those of its guesses."""

    step: QueuedStep
    members: Sequence["_Chain"]
    guessed: Sequence["_Chain"]


class _Chain:
    """Draft of a request so far."""

    def __init__(self, at: int, start: ChainStart) -> None:
        assert not start.mask, "guesses with a mask are made by the level drafter"
        self.at = at
        """Index of its page table."""
        self.start = start
        self.rule = Follower(start.rule, max_length=start.max_draft)
        self.num_rows = start.segment.start + start.segment.num_rows
        """Rows of the text with KV here, the drafted ones included."""
        self.rows: list[RowSlice] = []
        self.tokens: list[int] = []
        self.gaps: list[float] = []


def _append_guesses(guessing: Sequence[_Chain], level: _Level) -> list[_Chain]:
    """Adds a guess to each chain. Returns those that go on by their rules."""
    continuing: list[_Chain] = []
    best_G4 = level.step.read()
    tokens: list[int] = best_G4[:, 0].tolist()
    gaps: list[float] = score_gaps(best_G4).tolist()
    places = {chain.at: row for row, chain in enumerate(level.guessed)}
    for chain in guessing:
        row = places[chain.at]
        chain.tokens.append(tokens[row])
        chain.gaps.append(gaps[row])
        if chain.rule.takes(gaps[row]):
            continuing.append(chain)
    return continuing


def _reading_first(
    chains: Sequence[_Chain], guessing: Sequence[_Chain], tables_BW: Ints
) -> HeadRows | None:
    """Returns the known rows of those asked, after what the head has not read before them."""
    if not guessing:
        return None
    num_committed = [chain.start.segment.num_rows for chain in chains]
    end_committed = np.cumsum(num_committed).tolist()
    sources: list[int] = []
    tables: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    num_before = end_committed[-1]
    for chain in guessing:
        num_lagging = sum(row_slice.count for row_slice in chain.start.lagging)
        end = end_committed[chain.at]
        sources += range(num_before, num_before + num_lagging)
        sources += range(end - num_committed[chain.at], end)
        num_before += num_lagging
        first = chain.start.segment.start - num_lagging
        positions += range(first, chain.num_rows)
        tables += [chain.at] * (chain.num_rows - first)
        last.append(len(sources) - 1)
    divisors, words_G3 = _noise_after(guessing)
    return HeadRows(
        rows=chain_rows(tables_BW, _ints(tables), _ints(positions)),
        source_H=_ints(sources),
        last_G=_ints(last),
        divisors=divisors,
        words_G3=words_G3,
        filters=_filters_of(guessing),
        lagging=[row_slice for chain in guessing for row_slice in chain.start.lagging],
    )


def _reading_newest(
    continuing: Sequence[_Chain], guessing: Sequence[_Chain], tables_BW: Ints
) -> HeadRows | None:
    """Returns the new row of each one asked, of those that took a guess."""
    if not guessing:
        return None
    row_of = {chain.at: at for at, chain in enumerate(continuing)}
    divisors, words_G3 = _noise_after(guessing, num_new=1)
    return HeadRows(
        rows=chain_rows(
            tables_BW,
            _ints([chain.at for chain in guessing]),
            _ints([chain.num_rows for chain in guessing]),
        ),
        source_H=_ints([row_of[chain.at] for chain in guessing]),
        last_G=np.arange(len(guessing), dtype=np.int32),
        divisors=divisors,
        words_G3=words_G3,
        filters=_filters_of(guessing),
    )


def _filters_of(guessing: Sequence[_Chain]) -> RowFilters | None:
    return filters_by_row([chain.start.filters for chain in guessing])


def _noise_after(guessing: Sequence[_Chain], *, num_new: int = 0) -> tuple[list[float], Ints]:
    """Returns the temperatures and key words of the guesses after so many rows more."""
    keys = [
        noise_key(chain.start.seed, chain.num_rows + num_new) if chain.start.temperature else 0
        for chain in guessing
    ]
    return [chain.start.temperature for chain in guessing], key_words(keys)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)
