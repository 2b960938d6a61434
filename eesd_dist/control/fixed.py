"""`fixed`: the same draft length every round."""

from random import Random

from eesd_dist.control.base import Controller, ControlSetup
from eesd_dist.control.belief import Belief
from eesd_dist.types import Evidence, Outcome


def fixed(setup: ControlSetup, belief: Belief, rng: Random) -> Controller:
    return FixedController(length=setup.speculation.fixed_length)


class FixedController:
    """Drafts the same length every round."""

    needs_evidence = needs_probs = False

    def __init__(self, *, length: int) -> None:
        self._length = length
        self._drafted = 0

    def begin_round(self) -> None:
        self._drafted = 0

    def keep_drafting(self, evidence: Evidence) -> bool:
        goes_on = self._drafted < self._length
        self._drafted += goes_on
        return goes_on

    def observe(self, outcome: Outcome) -> None:
        return
