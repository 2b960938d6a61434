"""SmartSpec: one draft length for the whole batch, by goodput (Liu et al. 2024, arXiv 2406.14066).

Before every round it chooses, of the lengths 0 to the maximum, the one with the highest goodput:

    goodput(k) = n (1 + a + a^2 + ... + a^k) / seconds(n, k)

for n requests, where the sum is (1 - a^(k+1)) / (1 - a) and a is a moving average of the token
acceptance rate. Written from the paper's formulas, with two differences:

- The paper fits seconds as a linear function of the batch's tokens and of its context; here they
  are the measured cost model, linear between measured numbers of rows, at the mean context.
- Only judged tokens count for a, and a round without a draft is discounted as well. Otherwise a
  batch would learn nothing at length 0, and after low acceptance never draft again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from eesd_dist.control.base import ControlSetup, RoundLoad
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import ChainReport, ChainRule, of_length
from eesd_dist.control.cost import CostModel
from eesd_dist.control.tree_growth import Offer, TreeGrowth
from eesd_dist.types import Outcome, RequestId


class SmartSpec:
    """Batch-wide controller by one acceptance rate and the load."""

    needs_probs = False
    weighs_costs = False

    def __init__(self, setup: ControlSetup) -> None:
        self._cost = setup.assumed_cost
        self._trees = setup.trees
        self._ceiling = setup.speculation.max_draft_tokens
        self._discount = setup.speculation.discount
        self._requests: set[RequestId] = set()
        self._acceptance = Belief()

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        """Adds a request; the first one's belief initializes the moving average."""
        self._requests.add(request_id)
        if not self._acceptance.num_rounds:
            self._acceptance = belief

    def end(self, request_id: RequestId) -> None:
        self._requests.discard(request_id)

    def awake(self, request_ids: Sequence[RequestId]) -> Sequence[RequestId]:
        return request_ids

    def begin_round(self, load: RoundLoad) -> "_OneLength":
        return _OneLength(self.length_for(load), self._trees)

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        own_outcomes = [outcome for outcome in outcomes if outcome.request_id in self._requests]
        if own_outcomes:
            self._acceptance = self._acceptance.scaled(self._discount)
        for outcome in own_outcomes:
            self._acceptance = self._acceptance.after(outcome)

    def take_cost(self, cost: CostModel) -> None:
        self._cost = cost

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None:
        """Does nothing: the moving average adapts to another exit head."""

    def length_for(self, load: RoundLoad) -> int:
        """Returns the length with the highest goodput, the shortest of equals."""
        count = len(load.request_ids)
        step_s = self._cost.draft_batch(count)
        drafting_s = self._cost.known_batch(load.num_known)
        survival, tokens = 1.0, float(load.num_requests)
        best_length, best = 0, 0.0
        for length in range(self._ceiling + 1):
            rows = load.num_known + length * count
            verifying_s = self._cost.verify_batch(rows, load.num_requests)
            both = (drafting_s, verifying_s)
            goodput = tokens / (max(both) if load.overlapped else sum(both))
            if goodput > best:
                best_length, best = length, goodput
            survival *= self._acceptance.mean
            tokens += count * survival
            drafting_s += step_s
        return best_length


class _OneLength:
    """A round in which every request drafts the same number of tokens, or levels of a tree."""

    def __init__(self, length: int, trees: TreeGrowth) -> None:
        self._left = length
        self._trees = trees

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> Set[RequestId]:
        return frozenset(request_ids) if self._left else frozenset()

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        goes_on = self._left > 0
        self._left -= goes_on
        return self._trees.choose(offers, {offer.request_id: goes_on for offer in offers})

    def lookup_length(self, request_id: RequestId, find: Callable[[], tuple[int, int]]) -> int:
        return 0

    def has_rules(self, request_ids: Iterable[RequestId]) -> bool:
        return True

    def chain_rules(self, temperatures: Mapping[RequestId, float]) -> Mapping[RequestId, ChainRule]:
        return dict.fromkeys(temperatures, of_length(self._left))

    def report(self, reports: Mapping[RequestId, ChainReport]) -> None:
        """Does nothing: the length was decided before."""
