"""Activity of a pipeline's engine, and what it could do at most by its measured costs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from eesd_dist.control.cost import CostModel
from eesd_dist.control.overlap_policy import lengths_of
from eesd_dist.types import RoundStats

WINDOW_S = 10
"""Age up to which rounds count."""
FIRST_TOKEN_WINDOW_S = 30.0
"""Age up to which first tokens count."""
_PERCENTILE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Work that the engine of a pipeline has to do, and did in the last seconds."""

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
    """Seconds from arrival at the pipeline to the first token, the 90th percentile; None: no
    request."""


NO_ACTIVITY = Activity()
"""Activity of an engine that has nothing to do, or is not known."""


def max_tokens_per_s(cost: CostModel | None, activity: Activity, *, num_live: int) -> float | None:
    """Returns the tokens per second of `num_live` requests by the measured costs, if drafts have
    the present length and gain; None where no cost was measured."""
    if cost is None:
        return None
    round_s = cost.batch_seconds(lengths_of(activity.draft_length, num_live))
    return num_live * activity.tokens_per_turn / round_s


@dataclass(slots=True)
class _Second:
    """Sums of the rounds that began in one second."""

    unix_s: int
    num_emitted: int = 0
    num_turns: int = 0
    num_gained: int = 0
    num_drafted: int = 0


class RecentRounds:
    """Sums of an engine's rounds of late, second by second."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)

    def add(self, stats: RoundStats) -> None:
        """Adds a round. Rounds with rows of prompts do not count for a request's gain."""
        unix_s = int(stats.started_unix_s)
        if not self._seconds or self._seconds[-1].unix_s < unix_s:
            self._seconds.append(_Second(unix_s))
        second = self._seconds[-1]
        second.num_emitted += stats.num_emitted
        if not stats.num_prefill_rows:
            second.num_turns += stats.num_requests
            second.num_gained += stats.num_emitted
            second.num_drafted += stats.num_drafted

    def activity(
        self,
        *,
        time_unix_s: float,
        num_waiting: int,
        kv_use: float,
        first_tokens_s: Sequence[float],
    ) -> Activity:
        """Returns the activity by the rounds of the last ten seconds, the present one included, and
        the first-token times of late."""
        first_unix_s = int(time_unix_s) - (WINDOW_S - 1)
        seconds = [second for second in self._seconds if second.unix_s >= first_unix_s]
        num_turns = sum(second.num_turns for second in seconds)
        num_emitted = sum(second.num_emitted for second in seconds)
        num_gained = sum(second.num_gained for second in seconds)
        num_drafted = sum(second.num_drafted for second in seconds)
        return Activity(
            num_waiting=num_waiting,
            kv_use=kv_use,
            tokens_per_s=num_emitted / max(time_unix_s - first_unix_s, 1.0),
            tokens_per_turn=num_gained / num_turns if num_turns else 1.0,
            draft_length=num_drafted / num_turns if num_turns else 0.0,
            first_token_s=percentile(first_tokens_s),
        )


def percentile(values: Sequence[float]) -> float | None:
    """Returns the 90th percentile; None of no values."""
    if not values:
        return None
    return sorted(values)[int(_PERCENTILE * (len(values) - 1))]
