"""Caches the cost model as tables by count."""

from itertools import accumulate
from operator import add

from eesd_dist.control.cost import CostModel

_MOST_ROUNDS = 1024
"""Kept at a time."""


class CostTable:
    """Tables of the cost model's figures, non-decreasing in the number of rows."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._steps = [0.0]
        self._rows = [0.0]
        self._input_s: dict[int, float] = {}
        self._rounds: dict[tuple[int, int, int, bool], list[float]] = {}
        self.start_s, self.lookup_s = cost.start_s, cost.lookup_s
        self.guess_share = cost.guess_batch(1) / cost.draft_step_s if cost.draft_step_s else 0.0

    def rounds(
        self, count: int, longest: int, *, num_rows: int, requests: int, overlapped: bool
    ) -> list[float]:
        """Returns the seconds of a round in which `count` of its `requests` draft 0, 1, ... up to
        `longest` tokens each. `num_rows`: its known rows; `overlapped`: the longer of drafting and
        verifying counts, not both."""
        key = (count, num_rows, requests, overlapped)
        rounds_s = self._rounds.get(key)
        if rounds_s is None or len(rounds_s) <= longest:
            step_s, input_s = self.step(count), self.known(num_rows)
            rows = range(num_rows, num_rows + longest * count + 1, count)
            verify_s = accumulate((self._cost.verify_batch(row, requests) for row in rows), max)
            drafting_s = [input_s + length * step_s for length in range(longest + 1)]
            drafting_s[1:] = [self.start_s + seconds for seconds in drafting_s[1:]]
            if len(self._rounds) >= _MOST_ROUNDS:
                self._rounds.clear()
            rounds_s = list(map(max if overlapped else add, drafting_s, verify_s))
            self._rounds[key] = rounds_s
        return rounds_s

    def known(self, rows: int) -> float:
        if rows not in self._input_s:
            self._input_s[rows] = self._cost.known_batch(rows)
        return self._input_s[rows]

    def steps(self, max_tokens: int) -> list[float]:
        """Returns the seconds of levels of 0, 1, 2, ... up to at least `most` tokens."""
        steps = self._steps
        while len(steps) <= max_tokens:
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
        if len(self._rows) <= rows + more:
            table = self._cost.verify_batches(2 * (rows + more) + 1)
            self._rows = [0.0, *accumulate(table[1:], max)]
        verify_s = self._rows[rows : rows + more + 1]
        extra = self._cost.request_s * max(requests - 1, 0)
        return [seconds + extra for seconds in verify_s] if extra else verify_s
