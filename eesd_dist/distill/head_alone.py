"""Plays a head's rounds over recorded texts, without the target.

Coupled drafting accepts a token if it is the one that the target chose, which is the next token of
the text: at every position before the first rejection the text so far is the draft so far. The rows
of the text after layer N are therefore the rows that drafting would have computed, and one pass of
the head over them gives its guess at every position, whatever the rounds. Rounds only divide the
positions. The text of the target has to be written with the same noise, so that it is recorded with
its sampling parameters.
"""

# Shapes: T rows of a text, G guessed positions, V draft vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.distill.sources import TextRows
from eesd_dist.engine.layout import device_named
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.page_table import PageTable
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import draft_choice, top1_probs
from eesd_dist.types import Evidence, Outcome, Request

_PAGE_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guesses:
    """A head's guess of every token that the target wrote."""

    logits_GV: Tensor
    """Logits of the guesses, on the CPU."""
    tokens: Sequence[int]
    gaps: Sequence[float]
    top1_probs: Sequence[float]
    temperature: float
    """0 for greedy guesses."""


class HeadAlone:
    """A head as it drafts, without its target."""

    def __init__(self, model: Path, folder: Path, *, dtype: DType, max_length: int) -> None:
        """Raises CheckpointError for a head that is damaged or does not fit the target."""
        spec = ModelSpec.from_folder(model)
        self._device = device_named("auto")
        self._num_pages = -(-max_length // _PAGE_SIZE)
        self._head = ExitHead.load(
            folder,
            target=spec,
            target_path=model,
            dtype=dtype,
            numerics="invariant",
            device=self._device,
            num_pages=self._num_pages,
            page_size=_PAGE_SIZE,
        )

    @property
    def exit_layer(self) -> int:
        return self._head.exit_layer

    @property
    def vocab_ids(self) -> Tensor | None:
        """The target token of each draft index; None where the head has the whole vocabulary."""
        return None if self._head.vocab_ids is None else self._head.vocab_ids.cpu()

    @torch.inference_mode()
    def guesses(self, text: TextRows, request: Request) -> Guesses:
        """Returns a guess of each token after the prompt."""
        first = len(request.prompt)
        logits_GV = self._logits(text)[first - 1 : len(text.tokens) - 1]
        rules = [
            RowRule.of(request.sampling, position=position, num_prompt=first)
            for position in range(first, len(text.tokens))
        ]
        choice = draft_choice(logits_GV, rules, vocab_ids=self._head.vocab_ids)
        return Guesses(
            logits_GV=logits_GV.cpu(),
            tokens=choice.tokens[:, 0].tolist(),
            gaps=choice.gaps.tolist(),
            top1_probs=top1_probs(logits_GV),
            temperature=rules[0].params.noise_temperature if rules else 0.0,
        )

    def _logits(self, text: TextRows) -> Tensor:
        head, num_rows = self._head, text.num_rows
        hidden_TD = text.hidden[head.exit_layer].to(self._device, head.paged.compute_dtype)
        rows = RowPlan.build(
            [RowSegment(0, num_rows, PageTable(range(self._num_pages)))],
            page_size=_PAGE_SIZE,
            device=self._device,
            numerics="invariant",
        )
        return head.logits(head.forward(hidden_TD, rows))


def rounds_of(
    guesses: Guesses, text: TextRows, request: Request, *, draft_length: int
) -> list[Outcome]:
    """Returns the rounds in which the text would have been written with drafts of this length. Of
    a draft that the end of the text has cut, only the judged tokens are counted."""
    first, end = len(request.prompt), len(text.tokens)
    limit = first + request.sampling.max_tokens
    outcomes: list[Outcome] = []
    at = first
    while at < end:
        room = max(0, min(draft_length, limit - at - 1))
        accepted = 0
        while accepted < min(room, end - at) and (
            guesses.tokens[at + accepted - first] == text.tokens[at + accepted]
        ):
            accepted += 1
        num_drafted = accepted if at + accepted == end else room
        outcomes.append(
            Outcome(
                request_id=request.request_id,
                num_drafted=num_drafted,
                num_accepted=accepted,
                evidence=tuple(
                    _evidence(guesses, at - first + depth, depth=depth)
                    for depth in range(min(accepted + 1, num_drafted))
                ),
            )
        )
        at += accepted + 1
    return outcomes


def _evidence(guesses: Guesses, number: int, *, depth: int) -> Evidence:
    return Evidence(
        depth=depth,
        top1_prob=guesses.top1_probs[number],
        temperature=guesses.temperature,
        gap=guesses.gaps[number],
    )
