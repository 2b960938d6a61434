"""Learning rate schedule, and the number of steps in a time budget.

The learning rate is a function of the step number only, so that a resumed run has the same rates. A
budget in minutes is converted to a number of steps once, from steps timed during the warm-up, where
the rate does not depend on that number yet. Reads no clock and does not depend on models.
"""

import math
from dataclasses import dataclass

_FLOOR = 0.03
"""Final learning rate, as a share of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up for `warmup_steps`, then half a cosine down until `total_steps`."""

    peak: float
    warmup_steps: int
    total_steps: int | None
    """None during the timing of steps, when only rates of the warm-up are defined."""

    def at(self, step: int) -> float:
        """Returns the rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            raise AssertionError(f"step {step} is past the warm-up and the end is not known")
        span = max(self.total_steps - self.warmup_steps, 1)
        share = min((step - self.warmup_steps) / span, 1.0)
        return self.peak * (_FLOOR + (1.0 - _FLOOR) * 0.5 * (1.0 + math.cos(math.pi * share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Measured seconds of one step and of one evaluation."""

    step_s: float
    evaluation_s: float

    def steps_within(self, seconds: float, *, evaluation_period: int) -> int:
        """Returns the number of steps, with evaluations between them, that fit into the time."""
        seconds_per_step = self.step_s + self.evaluation_s / evaluation_period
        return max(int(seconds / seconds_per_step), 0) if seconds_per_step > 0.0 else 0
