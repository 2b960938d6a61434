"""Caches the cost model as tables by count."""

from typing import NamedTuple

import numpy as np

from eesd_dist.control.chain_rule import Doubles
from eesd_dist.control.cost import CostModel


class ChainCosts(NamedTuple):
    """A round of one request by the number of its drafted tokens, from 0."""

    seconds: list[float]
    longer_s: Doubles
    """Seconds more than without a draft."""


class CostTable:
    """Tables of the cost model's figures, non-decreasing in the number of rows."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._steps = [0.0]
        self._rows = [0.0]
        self._known: dict[int, float] = {}
        self._chains: dict[int, ChainCosts] = {}
        self.guess_share = cost.guess_batch(1) / cost.draft_step_s if cost.draft_step_s else 0.0

    def chain(self, known: int, longest: int) -> ChainCosts:
        """Returns the costs of a round of one request, up to `longest` drafted tokens or more."""
        found = self._chains.get(known)
        if found is None or len(found.seconds) <= longest:
            step_s, verify_s = self.step(1), self.verify_from(known, longest, 1)
            first_s = self.known(known)
            seconds = [first_s + count * step_s + v for count, v in enumerate(verify_s)]
            found = ChainCosts(seconds, np.array(seconds) - seconds[0])
            self._chains[known] = found
        return found

    def known(self, rows: int) -> float:
        if rows not in self._known:
            self._known[rows] = self._cost.known_batch(rows)
        return self._known[rows]

    def steps(self, most: int) -> list[float]:
        """Returns the seconds of levels of 0, 1, 2, ... up to at least `most` tokens."""
        steps = self._steps
        while len(steps) <= most:
            steps.append(max(steps[-1], self._cost.draft_batch(len(steps))))
        return steps

    def step(self, count: int) -> float:
        return self.steps(count)[count]

    def verify(self, rows: int, requests: int) -> float:
        if rows >= len(self._rows):
            self.verify_from(rows, 0, requests)
        return self._rows[rows] + self._cost.request_s * max(requests - 1, 0)

    def verify_from(self, rows: int, more: int, requests: int) -> list[float]:
        """Returns the seconds of verify passes over `rows` rows up to `rows + more`."""
        while len(self._rows) <= rows + more:
            self._rows.append(max(self._rows[-1], self._cost.verify_batch(len(self._rows))))
        found = self._rows[rows : rows + more + 1]
        extra = self._cost.request_s * max(requests - 1, 0)
        return [seconds + extra for seconds in found] if extra else found
