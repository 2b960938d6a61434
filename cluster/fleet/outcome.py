"""Figures that a simulation of a fleet has seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eesd_dist.statistics import percentile

_FLAP_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the wanted number."""

    at_s: float
    was: int
    target: int

    @property
    def is_up(self) -> bool:
        return self.target > self.was


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Figures of one run."""

    num_arrived: int = 0
    num_refusals: int = 0
    num_deaths: int = 0
    num_moves: int = 0
    """Times that a request continued in another pipeline."""
    first_token_s: list[float] = field(default_factory=list)
    """Arrival to first token, of each request that is over."""
    sojourn_s: list[float] = field(default_factory=list)
    """Arrival to last token."""
    changes: list[Change] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    """Times at which pipelines began to serve."""
    node_s: float = 0.0
    lasted_s: float = 0.0
    live_area: float = 0.0
    """Live requests, integrated over time."""
    _noted_s: float = 0.0

    def note_live(self, num_live: int, *, time_s: float) -> None:
        """Accounts for the time since the last note; call before the number changes."""
        self.live_area += num_live * (time_s - self._noted_s)
        self._noted_s = time_s

    @property
    def num_over(self) -> int:
        return len(self.sojourn_s)

    @property
    def num_lost(self) -> int:
        """Accepted requests that were not over when the run ended: there must be none."""
        return self.num_arrived - self.num_refusals - self.num_over

    def num_flaps(self, *, within_s: float = _FLAP_S) -> int:
        """Returns how often a change was taken back within so many seconds."""
        return sum(
            next_change.is_up != change.is_up and next_change.at_s - change.at_s <= within_s
            for change, next_change in pairwise(self.changes)
        )

    def summary(self) -> dict[str, float | int]:
        return {
            "requests": self.num_arrived,
            "refused": self.num_refusals,
            "lost": self.num_lost,
            "moved": self.num_moves,
            "deaths": self.num_deaths,
            "first_token_p50_s": quantile(self.first_token_s, 0.5),
            "first_token_p90_s": quantile(self.first_token_s, 0.9),
            "first_token_p99_s": quantile(self.first_token_s, 0.99),
            "sojourn_p50_s": quantile(self.sojourn_s, 0.5),
            "changes": len(self.changes),
            "flaps": self.num_flaps(),
            "node_hours": self.node_s / 3600.0,
            "hours": self.lasted_s / 3600.0,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that `share` of the values do not exceed; 0 if there is none."""
    return percentile(values, share) if values else 0.0
