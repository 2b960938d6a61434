"""Sampling parameters of one row of logits: its request's parameters at one position.

Plain values only. A row's history is the request's tokens plus the draft tokens before it, so that
penalties mean the same with speculation on and off. `processors` and `rule` apply a rule.
"""

from collections.abc import Sequence
from typing import Protocol, Self

from msgspec import structs

from eesd_dist.transport.contracts import Segment
from eesd_dist.trees import depths_of, path_to
from eesd_dist.types import SamplingParams, Value

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0, as in vLLM: dividing by them overflows."""


def noise_temperature(temperature: float) -> float:
    """Returns the temperature; 0 where the choice is greedy and has no noise."""
    return 0.0 if temperature < GREEDY_BELOW else temperature


class RowRule(Value, frozen=True, kw_only=True):
    """The parameters for choosing the token at `position` from its row of logits."""

    seed: int
    position: int
    """Position of the token being chosen; 0 is the prompt's first token."""
    temperature: float
    top_p: float
    top_k: int
    """0 keeps the whole vocabulary."""
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    num_prompt: int
    history: Sequence[int] = ()
    """All tokens before `position` if `needs_history`; otherwise it may be empty."""
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
            seed=params.seed,
            position=position,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            num_prompt=num_prompt,
            history=history,
            top_logprobs=params.top_logprobs,
            mask=mask,
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def noise_temperature(self) -> float:
        """The temperature; 0 where the choice is greedy and has no noise."""
        return noise_temperature(self.temperature)

    @property
    def is_filtered(self) -> bool:
        """True if tokens are filtered by rank or mass, which never affects a greedy choice."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def needs_history(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that must not be chosen yet: stop tokens, before min_tokens are generated, unless
        the mask leaves no others."""
        if self.position - self.num_prompt >= self.min_tokens:
            return ()
        if not self.mask:
            return self.stop_token_ids
        others = bytearray(self.mask)
        for token in self.stop_token_ids:
            if token < 8 * len(others):
                others[token >> 3] &= ~(1 << (token & 7))
        return self.stop_token_ids if any(others) else ()

    @property
    def edits_logits(self) -> bool:
        """True if single logits change before the temperature."""
        return bool(self.mask or self.logit_bias or self.forbidden) or self.needs_history


_WIDE_TOP_P, _WIDE_MIN_P, _WIDE_TOP_K = 0.9, 0.05, 20
"""Filters from here on, or up to here, keep nearly all probability."""


class ChoiceParams(Protocol):
    """Parameters of a request's choices, of `SamplingParams` or a `Segment`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...


def chooses_by_score(params: ChoiceParams, *, num_generated: int) -> bool:
    """Returns whether choices after so many generated tokens are made by logits and noise alone,
    among all tokens or those of a mask: no token is filtered or has its logit changed."""
    has_filters = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
    is_greedy = params.temperature < GREEDY_BELOW
    return (is_greedy or not has_filters) and _keeps_logits(params, num_generated=num_generated)


def is_guessed_by_score(params: ChoiceParams, *, num_generated: int) -> bool:
    """Returns whether logits and noise alone guess nearly as well as the whole rule: filters that
    keep nearly all probability are left to the verifier, which rejects what they exclude."""
    is_wide = (
        params.top_p >= _WIDE_TOP_P
        and params.min_p <= _WIDE_MIN_P
        and (params.top_k <= 0 or params.top_k >= _WIDE_TOP_K)
    )
    is_greedy = params.temperature < GREEDY_BELOW
    return (is_greedy or is_wide) and _keeps_logits(params, num_generated=num_generated)


def _keeps_logits(params: ChoiceParams, *, num_generated: int) -> bool:
    return (
        not params.logit_bias
        and not (params.stop_token_ids and num_generated < params.min_tokens)
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
    )


def rules_of(segment: Segment) -> list[RowRule]:
    """Returns one rule per reported row of a segment, in row order."""
    needs_history = (
        segment.repetition_penalty != 1.0
        or segment.presence_penalty != 0.0
        or segment.frequency_penalty != 0.0
    )
    positions = positions_after(segment)
    forced = [
        _reporting(token, position=position, num_top=segment.forced_top_logprobs)
        for token, position in zip(segment.forced, positions, strict=False)
    ]
    first = segment.num_rows - segment.num_sampled
    size = len(segment.masks) // max(segment.num_sampled, 1)
    return forced + [
        RowRule(
            seed=segment.seed,
            position=positions[row],
            temperature=segment.temperature,
            top_p=segment.top_p,
            top_k=segment.top_k,
            min_p=segment.min_p,
            repetition_penalty=segment.repetition_penalty,
            presence_penalty=segment.presence_penalty,
            frequency_penalty=segment.frequency_penalty,
            logit_bias=segment.logit_bias,
            min_tokens=segment.min_tokens,
            stop_token_ids=segment.stop_token_ids,
            num_prompt=segment.num_prompt,
            history=segment.history + _tokens_up_to(segment, row) if needs_history else (),
            top_logprobs=segment.top_logprobs,
            mask=segment.masks[(row - first) * size : (row - first + 1) * size],
        )
        for row in range(first, segment.num_rows)
    ]


def _reporting(token: int, *, position: int, num_top: int) -> RowRule:
    params = SamplingParams(temperature=0.0, top_logprobs=num_top)
    return structs.replace(RowRule.of(params, position=position, num_prompt=0), forced=token)


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
