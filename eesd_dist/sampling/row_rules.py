"""Sampling parameters of one row of logits: its request's parameters at one position.

Plain values only. A row's history is the request's tokens plus the draft tokens before it, so that
penalties mean the same with speculation on and off. `processors` and `rule` apply a rule.
"""

from collections.abc import Sequence
from typing import Self

from eesd_dist.transport.contracts import Segment
from eesd_dist.trees import depths_of, path_to
from eesd_dist.types import ChoiceParams, SamplingParams, Value


class RowRule(Value, frozen=True, kw_only=True):
    """The parameters for choosing the token at `position` from its row of logits."""

    params: ChoiceParams
    position: int
    """Position of the token being chosen; 0 is the prompt's first token."""
    num_prompt: int
    history: Sequence[int] = ()
    """All tokens before `position` if the parameters need it; otherwise it may be empty."""
    top_logprobs: int | None = None
    forced: int = -1
    """The token to report, whatever the logits; -1: none."""
    mask: bytes = b""
    """A bit per token that may be chosen, the lowest bit of the first byte for token 0; empty: any
    token."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        position: int,
        num_prompt: int,
        history: Sequence[int] = (),
        mask: bytes = b"",
    ) -> Self:
        return cls(
            params=params,
            position=position,
            num_prompt=num_prompt,
            history=history,
            top_logprobs=params.top_logprobs,
            mask=mask,
        )

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that must not be chosen yet: stop tokens, before min_tokens are generated, unless
        the mask leaves no others."""
        if self.position - self.num_prompt >= self.params.min_tokens:
            return ()
        if not self.mask:
            return self.params.stop_token_ids
        others = bytearray(self.mask)
        for token in self.params.stop_token_ids:
            if token < 8 * len(others):
                others[token >> 3] &= ~(1 << (token & 7))
        return self.params.stop_token_ids if any(others) else ()

    @property
    def edits_logits(self) -> bool:
        """True if single logits change before the temperature."""
        return bool(self.mask or self.forbidden) or self.params.edits_logits


def is_guessed_by_score(params: ChoiceParams, *, has_filters: bool) -> bool:
    """Returns whether logits and noise alone guess nearly as well as the whole rule. Penalties and
    biases, and filters that keep nearly all probability, are left to the verifier, which rejects
    what they exclude. `has_filters`: narrow ones are applied to guesses, too."""
    return has_filters or not params.is_narrow


def keeps_logits(params: ChoiceParams, *, num_generated: int) -> bool:
    """Returns whether no token has its logit changed, but by a mask, in choices after so many
    generated tokens."""
    is_forbidden = params.stop_token_ids and num_generated < params.min_tokens
    return not (params.edits_logits or is_forbidden)


def rules_of(segment: Segment) -> list[RowRule]:
    """Returns one rule per reported row of a segment, in row order."""
    params = segment.params
    needs_history = params.needs_history
    positions = positions_after(segment)
    forced = [
        _reporting(token, position=position, num_top=segment.forced_top_logprobs)
        for token, position in zip(segment.forced, positions, strict=False)
    ]
    first = segment.num_rows - segment.num_sampled
    size = len(segment.masks) // max(segment.num_sampled, 1)
    return forced + [
        RowRule(
            params=params,
            position=positions[row],
            num_prompt=segment.num_prompt,
            history=segment.history + _tokens_up_to(segment, row) if needs_history else (),
            top_logprobs=segment.top_logprobs,
            mask=segment.masks[(row - first) * size : (row - first + 1) * size],
        )
        for row in range(first, segment.num_rows)
    ]


def _reporting(token: int, *, position: int, num_top: int) -> RowRule:
    greedy = ChoiceParams(temperature=0.0)
    return RowRule(
        params=greedy, position=position, num_prompt=0, top_logprobs=num_top, forced=token
    )


def positions_after(segment: Segment) -> list[int]:
    """Returns the position of the token that follows each row."""
    num_committed = segment.num_known
    committed_positions = [segment.start + row + 1 for row in range(num_committed)]
    return committed_positions + [
        segment.start + num_committed + d for d in depths_of(segment.parents)
    ]


def _tokens_up_to(segment: Segment, row: int) -> tuple[int, ...]:
    """Returns the segment's tokens up to and including this row; in a tree only its ancestors."""
    num_committed = segment.num_known
    if row < num_committed:
        return segment.tokens[: row + 1]
    path = path_to(segment.parents, row - num_committed)
    return segment.tokens[:num_committed] + tuple(
        segment.tokens[num_committed + node] for node in path
    )
