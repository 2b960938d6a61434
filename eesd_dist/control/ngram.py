"""Drafts by prompt lookup alone, as vLLM's `ngram` (prompt lookup decoding, Saxena 2023).

The baseline without a model: what followed an earlier occurrence of the text's last tokens is
drafted, up to `fixed_length` tokens, whatever it costs; where there is none the round is plain.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from eesd_dist.control.base import ControlSetup, RoundLoad
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.chain_rule import ChainReport, ChainRule, of_length
from eesd_dist.control.cost import CostModel
from eesd_dist.control.tree_growth import Offer
from eesd_dist.types import Outcome, RequestId


class NGram:
    """Batch controller, and each of its rounds: decisions depend on no state."""

    needs_probs = False
    weighs_costs = False

    def __init__(self, setup: ControlSetup) -> None:
        self._longest = setup.speculation.fixed_length

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        """Does nothing, as the other methods that tell of requests, costs and heads."""

    def end(self, request_id: RequestId) -> None: ...

    def observe(self, outcomes: Iterable[Outcome]) -> None: ...

    def take_cost(self, cost: CostModel) -> None: ...

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None: ...

    def report(self, reports: Mapping[RequestId, ChainReport]) -> None: ...

    def awake(self, request_ids: Sequence[RequestId]) -> Sequence[RequestId]:
        return request_ids

    def begin_round(self, load: RoundLoad) -> "NGram":
        return self

    def lookup_length(self, request_id: RequestId, find: Callable[[], tuple[int, int]]) -> int:
        _, num_following = find()
        return min(num_following, self._longest)

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> Set[RequestId]:
        return frozenset()

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        return [False] * len(offers)

    def has_rules(self, request_ids: Iterable[RequestId]) -> bool:
        return True

    def chain_rules(self, temperatures: Mapping[RequestId, float]) -> Mapping[RequestId, ChainRule]:
        return dict.fromkeys(temperatures, of_length(0))
