"""What a draft costs in seconds, and what length earns most by it.

Decides tokens per second from survival probabilities and a start-up profile. Refuses to know where
the figures come from, and what is believed about acceptance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from eesd_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a round as measured on the machine at hand."""

    draft_step_s: float
    """One drafted token through layers [0, N) and the exit head."""
    verify_s: tuple[float, ...]
    """verify_s[i]: a verify pass over i + 1 rows. A draft of k tokens has k + 1 rows; beyond the
    table the last slope goes on."""
    round_s: float = 0.0
    """Paid once a round whatever its length: first token through [0, N), transfer, planning."""

    def __post_init__(self) -> None:
        if not self.verify_s or min(self.verify_s) <= 0 or self.draft_step_s < 0:
            raise ConfigError(
                f"cost model: found draft_step_s={self.draft_step_s}, verify_s={self.verify_s}, "
                "expected at least one positive verify time: run the start-up profile again"
            )

    def verify(self, num_drafted: int) -> float:
        """v(k): seconds to verify a draft of k tokens."""
        last = len(self.verify_s) - 1
        if num_drafted <= last:
            return self.verify_s[num_drafted]
        slope = max(self.verify_s[last] - self.verify_s[last - 1], 0.0) if last else 0.0
        return self.verify_s[last] + slope * (num_drafted - last)

    def seconds(self, num_drafted: int) -> float:
        """A whole round with a draft of k tokens."""
        return self.round_s + num_drafted * self.draft_step_s + self.verify(num_drafted)

    def rate(self, num_drafted: int, survival: Sequence[float]) -> float:
        """Expected tokens per second; survival[j] is the chance that drafts 0..j all survive."""
        return (1.0 + sum(survival[:num_drafted])) / self.seconds(num_drafted)

    def best_length(self, survival: Sequence[float]) -> int:
        """The length of highest rate, the shortest among equals."""
        return max(range(len(survival) + 1), key=lambda k: (self.rate(k, survival), -k))

    def best_rate(self, *, theta: float, max_draft_tokens: int) -> float:
        """The rate of the best length when every token is accepted with probability theta."""
        survival = list(accumulate([theta] * max_draft_tokens, mul))
        return self.rate(self.best_length(survival), survival)

    def to_json(self) -> dict[str, object]:
        return {
            "draft_step_s": self.draft_step_s,
            "verify_s": list(self.verify_s),
            "round_s": self.round_s,
        }

    @staticmethod
    def from_json(data: Mapping[str, object]) -> "CostModel":
        verify_s = data.get("verify_s")
        if not isinstance(verify_s, Sequence):
            raise ConfigError(f"cost model: found verify_s={verify_s!r}, expected seconds")
        return CostModel(
            draft_step_s=_seconds(data.get("draft_step_s")),
            verify_s=tuple(_seconds(x) for x in verify_s),
            round_s=_seconds(data.get("round_s", 0.0)),
        )


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"cost model: found {value!r}, expected seconds")
    return float(value)
