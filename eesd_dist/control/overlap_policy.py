"""Decides whether two microbatches are faster than all requests in one batch.

Two microbatches keep both stages busy, but each verify pass then serves half as many requests: that
is faster if drafting takes about as long as verifying, and slower if one of them is almost all of a
round. Depends on the cost model and on recent draft lengths, not on requests.
"""

from eesd_dist.control.cost import CostModel

_MEMORY = 0.9
MARGIN = 0.05
"""Minimum gain of a change, which leaves one stage idle for a round."""


class OverlapPolicy:
    """Overlap decision of one engine, made before every round."""

    def __init__(self, cost: CostModel | None) -> None:
        """`cost`: None decides for one batch, since nothing is drafted without a cost model."""
        self._cost = cost
        self._drafted = 0.0
        """Running mean of drafted tokens per request and round."""
        self._pays = False

    def observe(self, *, num_drafted: int, num_requests: int) -> None:
        """Adds a finished round; `num_requests`: its requests that may draft."""
        if num_requests:
            mean = num_drafted / num_requests
            self._drafted += (1.0 - _MEMORY) * (mean - self._drafted)

    def pays(self, num_requests: int) -> bool:
        """Returns whether two microbatches are faster with `num_requests` in the engine."""
        if self._cost is None or num_requests < 2:
            self._pays = False
            return False
        gain = self._together_s(num_requests) / self._overlapped_s(num_requests)
        self._pays = gain > (1.0 - MARGIN if self._pays else 1.0 + MARGIN)
        return self._pays

    def _together_s(self, num_requests: int) -> float:
        """Returns the seconds until every request has had a round, in one batch."""
        assert self._cost is not None
        return self._cost.batch_seconds(lengths_of(self._drafted, num_requests))

    def _overlapped_s(self, num_requests: int) -> float:
        assert self._cost is not None
        larger = lengths_of(self._drafted, -(-num_requests // 2))
        return 2 * self._cost.batch_seconds(larger, overlapped=True)


def lengths_of(mean: float, num_requests: int) -> list[int]:
    """Returns draft lengths of so many requests that add up to this mean."""
    length, more = divmod(round(mean * num_requests), num_requests)
    return [length + (i < more) for i in range(num_requests)]
