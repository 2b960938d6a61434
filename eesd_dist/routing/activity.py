"""What the engine of a pipeline does, and what it could do at most by its measured costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eesd_dist.control.cost import CostModel
from eesd_dist.types import RoundStats

WINDOW_S = 10.0
"""Age up to which rounds count."""
FIRST_TOKEN_WINDOW_S = 30.0
"""Age up to which first tokens count."""
_PERCENTILE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the engine of a pipeline has to do, and did in the last seconds."""

    num_waiting: int = 0
    """Live requests in its queue."""
    kv_use: float = 0.0
    """Share of its KV pages in use, 0 to 1."""
    tokens_per_s: float = 0.0
    tokens_per_turn: float = 1.0
    """Tokens that a request gains in one round."""
    draft_length: float = 0.0
    """Tokens drafted for a request in one round."""
    first_token_s: float | None = None
    """From arrival at the pipeline to the first token, the 90th percentile; None: no request."""


NO_ACTIVITY = Activity()
"""Of an engine that has nothing to do, or is not known."""


def max_tokens_per_s(cost: CostModel | None, activity: Activity, *, num_live: int) -> float | None:
    """Returns the tokens per second of `num_live` requests by the measured costs, if drafts have
    the present length and gain; None where no cost was measured."""
    if cost is None:
        return None
    round_s = cost.batch_seconds([round(activity.draft_length)] * num_live)
    return num_live * activity.tokens_per_turn / round_s


def activity_of(
    rounds: Iterable[RoundStats],
    *,
    now_unix_s: float,
    num_waiting: int,
    kv_use: float,
    first_tokens_s: Sequence[float],
) -> Activity:
    """Returns the activity by the rounds of the last ten seconds (`rounds`: latest first) and the
    first-token times of late. Rounds with rows of prompts do not count for a request's gain."""
    num_emitted = num_turns = num_gained = num_drafted = 0
    for stats in rounds:
        if stats.started_unix_s < now_unix_s - WINDOW_S:
            break
        num_emitted += stats.num_emitted
        if not stats.num_prefill_rows:
            num_turns += stats.num_requests
            num_gained += stats.num_emitted
            num_drafted += stats.num_drafted
    return Activity(
        num_waiting=num_waiting,
        kv_use=kv_use,
        tokens_per_s=num_emitted / WINDOW_S,
        tokens_per_turn=num_gained / num_turns if num_turns else 1.0,
        draft_length=num_drafted / num_turns if num_turns else 0.0,
        first_token_s=percentile(first_tokens_s),
    )


def percentile(values: Sequence[float]) -> float | None:
    """Returns the 90th percentile of first-token times; None of no values."""
    if not values:
        return None
    return sorted(values)[int(_PERCENTILE * (len(values) - 1))]
