"""How large a step is, and how many of them a time budget buys.

The learning rate is a function of the step's number and of nothing else, so that a run that was
stopped goes on along the same curve. A budget in minutes is turned into a number of steps once,
from steps that were timed during the warm-up, where the rate does not depend on that number yet.
It reads no clock and knows no model.
"""

import math
from dataclasses import dataclass

_FLOOR = 0.03
"""Share of the peak that is left at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Up in a line for `warmup_steps`, then down half a cosine until `total_steps`."""

    peak: float
    warmup_steps: int
    total_steps: int | None
    """None while the budget is being measured: only warm-up steps can be asked for."""

    def at(self, step: int) -> float:
        """Of the step with this number, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            raise AssertionError(f"step {step} is past the warm-up and the end is not known")
        span = max(self.total_steps - self.warmup_steps, 1)
        share = min((step - self.warmup_steps) / span, 1.0)
        return self.peak * (_FLOOR + (1.0 - _FLOOR) * 0.5 * (1.0 + math.cos(math.pi * share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What one step and one evaluation were measured to take."""

    step_s: float
    evaluation_s: float

    def steps_within(self, seconds: float, *, evaluate_every: int) -> int:
        """How many steps, with the evaluations between them, fit into the time."""
        each_s = self.step_s + self.evaluation_s / evaluate_every
        return max(int(seconds / each_s), 0) if each_s > 0.0 else 0
