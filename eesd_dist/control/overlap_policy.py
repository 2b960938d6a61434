"""Whether two microbatches that take turns earn more than all requests in one batch.

Two microbatches keep both stages busy, and each verify pass then serves half as many requests: that
pays where drafting takes about as long as verifying, and costs where one of them is nearly all of a
round. Decides from the cost model and from how much is drafted lately; knows no request.
"""

from eesd_dist.control.cost import CostModel

_MEMORY = 0.9
_MARGIN = 0.05
"""What has to be won before the present way is given up: a change idles one stage for a round."""


class OverlapPolicy:
    """One engine's choice, asked before every round."""

    def __init__(self, cost: CostModel | None) -> None:
        """Without a cost model nothing is drafted: one batch."""
        self._cost = cost
        self._drafted = 0.0
        """Tokens that a request drafts in a round, lately."""
        self._pays = False

    def observe(self, *, num_drafted: int, num_requests: int) -> None:
        """A round that is over, the requests of it that may draft."""
        if num_requests:
            mean = num_drafted / num_requests
            self._drafted += (1.0 - _MEMORY) * (mean - self._drafted)

    def pays(self, num_requests: int) -> bool:
        """With so many requests in the engine."""
        if self._cost is None or num_requests < 2:
            self._pays = False
            return False
        gain = self._together_s(num_requests) / self._overlapped_s(num_requests)
        self._pays = gain > (1.0 - _MARGIN if self._pays else 1.0 + _MARGIN)
        return self._pays

    def _together_s(self, num_requests: int) -> float:
        """Until every request has had a round."""
        assert self._cost is not None
        return self._cost.batch_seconds(self._lengths(num_requests))

    def _overlapped_s(self, num_requests: int) -> float:
        assert self._cost is not None
        larger = self._lengths(-(-num_requests // 2))
        return 2 * self._cost.batch_seconds(larger, overlapped=True)

    def _lengths(self, num_requests: int) -> list[int]:
        """Whole drafts that add up to what is drafted lately."""
        total = round(self._drafted * num_requests)
        each, more = divmod(total, num_requests)
        return [each + (i < more) for i in range(num_requests)]
