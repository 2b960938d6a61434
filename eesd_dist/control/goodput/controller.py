"""`goodput`: draft lengths of a whole batch at once, by tokens per second.

At each level every request has a possible next token (of a tree: several), and each of these a
chance to survive, by a Thompson draw of what its request's acceptance may be. All compete for the
same rows: they are taken in order of survival while the expected tokens are worth more than their
seconds cost (`allocation`). What a second is worth is the batch's long-run rate (renewal reward,
Dinkelbach's iteration), so that hard rounds stop sooner and easy ones go on longer.

    theta = sigmoid(logit m + pool + own + z * std)      z ~ N(0, 1), once a request and round

m is the calibrated probability of this very token, `pool` and `own` are how far all requests and
this one are off from it (`drift`): Calibration-TS with its mixing done in log-odds. On recorded
rounds of the bundled model this forecasts better (log-loss 0.504) than its beta form at any
strength (0.508 at best), since a request's own counts say little beside the evidence.

Drafting nothing is chosen freely, and before the exit head has done any work. Whatever the means
say does not pay, an optimistic draw or a probe that keeps an unlucky belief from lasting for ever,
is paid from two purses, together one token in two hundred: one for looking and one for drafting, so
that the cheaper way never starves the surer one. Hopeless traffic stays as fast as plain decoding.
Refuses to know tensors, tokens and clocks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from eesd_dist.control.base import ControlSetup, RoundLoad
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator, judged_tokens, logit
from eesd_dist.control.cost import CostModel
from eesd_dist.control.goodput.allocation import (
    Allocation,
    Entry,
    Prices,
    best_allocation,
    best_chain,
)
from eesd_dist.control.goodput.drift import Drift, sigmoid
from eesd_dist.control.offers import Offer
from eesd_dist.control.survival import ROOT, Node, RankShares, Siblings
from eesd_dist.types import Evidence, Outcome, RequestId

_POOL_STD, _POOL_MEMORY = 1.0, 0.995
_OWN_STD, _OWN_MEMORY = 0.3, 0.98
_RATE_MEMORY = 0.98
"""Of the long-run rate, per round."""
_RATE_START_TOKENS = 24.0
"""How many tokens' worth the promises are believed before one was kept."""
_TYPICAL_START = 0.7
_TYPICAL_MEMORY = 0.95
"""Of what a request's tokens are usually like, per guess."""
_POOL_TYPICAL_MEMORY = 0.995
_PRIOR_GUESSES = 4.0
_PURSE_SHARE, _LOOK_SHARE = 0.0015, 0.0035
"""Of all tokens, for the two ways of finding out: drafting, and looking at guesses."""
_PURSE_MEMORY = 0.99
"""Of the dearest probe that a purse may be saved for: rounds differ in size."""
_LOOK_MEMORY = 0.98
_LOOK_AHEAD = 16
"""Possible tokens a level may consider, its own and later ones together: a small batch looks over
the steps of the cost table, in a large one the next rows of the others lead over them."""


class _Typical:
    """What guesses are usually worth: mean and spread of their chances, the late ones most."""

    __slots__ = ("_memory", "_variance", "_weight", "mean")

    def __init__(self, *, mean: float, weight: float, memory: float) -> None:
        self.mean = mean
        self._weight = weight
        self._memory = memory
        self._variance = 0.04

    def see(self, chance: float) -> None:
        self._weight = self._memory * self._weight + 1.0
        off = chance - self.mean
        self.mean += off / self._weight
        self._variance += (off * off - self._variance) / self._weight

    @property
    def std(self) -> float:
        return math.sqrt(self._variance)


class _Trust:
    """How well promised rates were kept: tokens that came over tokens that were promised."""

    def __init__(self) -> None:
        self._came = self._promised = _RATE_START_TOKENS

    @property
    def factor(self) -> float:
        return self._came / self._promised

    def observe(self, *, came: float, promised: float, share: float) -> None:
        """One request's `share` of a round."""
        keep = _RATE_MEMORY**share
        self._came = keep * self._came + came
        self._promised = keep * self._promised + promised


class _Costs:
    """The cost model by the count, each figure asked for once; more rows never cost less."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._steps = [0.0]
        self._rows = [0.0]
        self._known: dict[int, float] = {}
        self.guess_share = cost.guess_batch(1) / cost.draft_step_s if cost.draft_step_s else 0.0

    def known(self, rows: int) -> float:
        if rows not in self._known:
            self._known[rows] = self._cost.known_batch(rows)
        return self._known[rows]

    def steps(self, most: int) -> list[float]:
        """Seconds of levels of 0, 1, 2, ... and at least `most` tokens."""
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
        """Seconds of verify passes over `rows` rows, one more, and so on."""
        while len(self._rows) <= rows + more:
            self._rows.append(max(self._rows[-1], self._cost.verify_batch(len(self._rows))))
        found = self._rows[rows : rows + more + 1]
        extra = self._cost.request_s * max(requests - 1, 0)
        return [seconds + extra for seconds in found] if extra else found


@dataclass(slots=True, kw_only=True, eq=False)
class _Round:
    """What the round under way costs so far, and what its seconds are worth."""

    num_requests: int
    num_known: int
    overlapped: bool
    num_ours: int = 0
    drafting_s: float = 0.0
    num_drafted: int = 0
    level: int = 0
    promise: float = 0.0
    """Tokens per second the mean request promises."""
    rate: float = 0.0
    """What a second is taken to be worth."""
    probe_price: float = 0.0
    """In tokens: one token drafted for everybody."""
    is_probe: bool = False
    look_price: float = 0.0
    """In tokens: of a guess that is looked at in mere hope."""

    def seconds(self, costs: _Costs, *, level: int = 0) -> float:
        """As it stands, or with one more level of so many tokens."""
        drafting = self.drafting_s + costs.step(level)
        rows = self.num_known + self.num_drafted + level
        verifying = costs.verify(rows, self.num_requests)
        return max(drafting, verifying) if self.overlapped else drafting + verifying


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    rng: Random
    typical: _Typical
    own: Drift = field(default_factory=lambda: Drift(std=_OWN_STD, memory=_OWN_MEMORY))
    chance: float = 0.0
    """This round's draw of chance, in standard deviations."""
    nodes: list[Node] = field(default_factory=list)
    """Of this round's drafted tokens, in the order they were taken."""
    best: Node = ROOT
    """The likeliest of the newest level."""
    turn: _Round | None = None
    """The round that its next verdict is of."""

    def node(self, index: int) -> Node:
        return self.nodes[index] if index >= 0 else ROOT


class Goodput:
    """The requests of one engine that are drafted for together. One thread."""

    needs_evidence = True

    def __init__(self, setup: ControlSetup) -> None:
        self._setup = setup
        self._costs = _Costs(setup.assumed_cost)
        self._calibrator = setup.calibrator
        self._ceiling = setup.speculation.max_draft_tokens
        self._learns = setup.speculation.learn
        self._requests: dict[RequestId, _Request] = {}
        self._round = _Round(num_requests=0, num_known=0, overlapped=False)
        self._pool = Drift(std=_POOL_STD, memory=_POOL_MEMORY)
        self._typical = _Typical(
            mean=_TYPICAL_START, weight=_PRIOR_GUESSES, memory=_POOL_TYPICAL_MEMORY
        )
        self._ranks = RankShares(discount=_POOL_MEMORY)
        self._trust = _Trust()
        self._purse = 0.0
        """For probes and optimistic draws, in tokens."""
        self._look_purse = 0.0
        self._purse_room = 0.0
        self._look_profit = 0.0
        """Tokens a look at a level nobody was sure of has earned, beyond what it cost."""

    # -- requests -------------------------------------------------------------------------------

    def admit(self, request_id: RequestId, belief: Belief) -> None:
        self._requests[request_id] = _Request(
            rng=self._setup.rng(request_id), typical=self._prior(belief)
        )

    def end(self, request_id: RequestId) -> None:
        self._requests.pop(request_id, None)

    def recalibrate(self, calibrator: Calibrator, beliefs: Mapping[RequestId, Belief]) -> None:
        """Another exit head: what the old one was off by says nothing of it."""
        self._calibrator = calibrator
        self._pool = Drift(std=_POOL_STD, memory=_POOL_MEMORY)
        for request in list(self._requests.values()):  # others may be admitting
            request.own = Drift(std=_OWN_STD, memory=_OWN_MEMORY)

    def _prior(self, belief: Belief) -> _Typical:
        """All requests' usual token, and as much of this one's as its belief is worth."""
        weight = belief.weight + _PRIOR_GUESSES
        mean = (_PRIOR_GUESSES * self._typical.mean + belief.weight * belief.mean) / weight
        return _Typical(mean=mean, weight=weight, memory=_TYPICAL_MEMORY)

    # -- a round --------------------------------------------------------------------------------

    def begin_round(self, load: RoundLoad) -> "Goodput":
        request_ids = load.request_ids
        turn = self._round = _Round(
            num_requests=load.num_requests, num_known=load.num_known, overlapped=load.overlapped
        )
        if self._learns:
            self._pool.forget_a_little()
        for request_id in request_ids:
            request = self._requests[request_id]
            if self._learns:
                request.own.forget_a_little()
            request.chance = request.rng.gauss(0.0, 1.0)
            request.nodes.clear()
            request.best = ROOT
            request.turn = turn
        turn.num_ours = len(request_ids)
        turn.drafting_s = self._costs.known(load.num_known)
        self._set_rate(turn, request_ids)
        self._fill_purse(turn)
        return self

    def _set_rate(self, turn: _Round, request_ids: Sequence[RequestId]) -> None:
        """What a second of this round is worth: the promise of the mean request at the best common
        length, corrected by how such promises were kept. So it follows the load at once."""
        theta = sum(self._requests[i].typical.mean for i in request_ids) / len(request_ids)
        plain_s = turn.seconds(self._costs)
        plain = promise = turn.num_requests / plain_s
        drafting, tokens, survival = turn.drafting_s, float(turn.num_requests), 1.0
        step_s = self._costs.step(turn.num_ours)
        for length in range(1, self._ceiling + 1):
            survival *= theta
            tokens += turn.num_ours * survival
            drafting += step_s
            verifying = self._costs.verify(
                turn.num_known + length * turn.num_ours, turn.num_requests
            )
            seconds = max(drafting, verifying) if turn.overlapped else drafting + verifying
            promise = max(promise, tokens / seconds)
        turn.promise = promise
        turn.rate = max(promise * self._trust.factor, plain)

    def _fill_purse(self, turn: _Round) -> None:
        """A purse never holds more than the dearest probe of late costs."""
        probe_s = turn.seconds(self._costs, level=turn.num_ours) - turn.seconds(self._costs)
        price = turn.rate * probe_s
        self._purse_room = max(price, _PURSE_MEMORY * self._purse_room, 0.01)
        room, count = self._purse_room, turn.num_requests
        self._purse = min(self._purse + _PURSE_SHARE * count, room)
        self._look_purse = min(self._look_purse + _LOOK_SHARE * count, room)
        turn.probe_price = price

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> frozenset[RequestId]:
        """Whose next guess is worth the exit head's work: before a guess its token is only known to
        be like others of its request."""
        turn, first = self._round, self._round.level == 0
        if not request_ids:
            return frozenset()
        requests = [self._requests[request_id] for request_id in request_ids]
        expected = [request.best.expected * request.typical.mean for request in requests]
        wanted = self._worth(request_ids, expected, guess_weight=1.0)
        if len(wanted) < len(request_ids):
            # An easy token would be drafted, a hard one would not: at even chances of either, the
            # guess is paid for twice over by the easy one alone.
            spread = self._typical.std
            hopeful = [
                request.best.expected * min(request.typical.mean + spread, 1.0)
                for request in requests
            ]
            looked = self._worth(request_ids, hopeful, guess_weight=2.0)
            wanted = wanted | looked if wanted else self._looks_that_pay(looked)
        if first and not wanted and self._purse >= turn.probe_price:
            turn.is_probe = True
            return frozenset(request_ids)
        return wanted

    def _looks_that_pay(self, looked: frozenset[RequestId]) -> frozenset[RequestId]:
        """A level that nobody is sure of is looked at where such looks have paid, or from their
        purse."""
        if not looked:
            return looked
        turn, costs = self._round, self._costs
        price = turn.rate * costs.guess_share * costs.step(len(looked))
        if self._look_profit < 0.0:
            if self._look_purse < price:
                return frozenset()
            self._look_purse -= price
        turn.look_price = price
        return looked

    def _worth(
        self, request_ids: Sequence[RequestId], survival: list[float], *, guess_weight: float
    ) -> frozenset[RequestId]:
        prices = self._prices(len(request_ids), given=0, guess_weight=guess_weight)
        owners = self._best(request_ids, survival, survival, prices).owners
        return frozenset(request_ids[owner] for owner in owners)

    def choose(self, offers: Sequence[Offer], *, given: int) -> list[bool]:
        if not offers:
            self._close_level(asked=given, taken=given)
            return []
        nodes = self._nodes(offers)
        taken = self._pick(offers, nodes, given)
        newest: dict[RequestId, Node] = {}
        for offer, node, is_taken in zip(offers, nodes, taken, strict=True):
            if is_taken:
                self._requests[offer.request_id].nodes.append(node)
                newest[offer.request_id] = max(newest.get(offer.request_id, node), node)
        for request_id, node in newest.items():
            self._requests[request_id].best = node
        self._close_level(
            asked=given + sum(offer.rank == 0 for offer in offers), taken=given + sum(taken)
        )
        return taken

    def _pick(self, offers: Sequence[Offer], nodes: Sequence[Node], given: int) -> list[bool]:
        turn = self._round
        if turn.is_probe and turn.level == 0:
            self._purse -= turn.probe_price
            return [offer.rank == 0 for offer in offers]
        ids = [offer.request_id for offer in offers]
        drawn, expected = [node.drawn for node in nodes], [node.expected for node in nodes]
        prices = self._prices(len(offers), given=given, guess_weight=0.0)
        best = self._best(ids, drawn, expected, prices)
        if best.expected_value < 0.0:
            if -best.expected_value > self._purse:
                best = self._best(ids, expected, expected, prices)
            else:
                self._purse += best.expected_value
        if turn.look_price:
            profit = max(best.expected_value, 0.0) - turn.look_price
            self._look_profit += (1.0 - _LOOK_MEMORY) * (profit - self._look_profit)
            turn.look_price = 0.0
        return [index in best.owners for index in range(len(offers))]

    def _nodes(self, offers: Sequence[Offer]) -> list[Node]:
        """Survival of each offer. Of siblings, a later one counts when all before it are wrong, and
        never more than the one before it: they are drafted in order of rank."""
        nodes: list[Node] = []
        siblings: dict[tuple[RequestId, int], Siblings] = {}
        for offer in offers:
            key = (offer.request_id, offer.parent)
            group = siblings.get(key)
            if group is None:
                group = siblings[key] = self._siblings(offer)
            nodes.append(group.next_node(self._ranks.of(offer.rank)))
        return nodes

    def _siblings(self, offer: Offer) -> Siblings:
        request = self._requests[offer.request_id]
        score = logit(self._calibrator.probability(offer.evidence)) + self._pool.mean
        mean = sigmoid(score + request.own.mean)
        std = math.sqrt(request.own.variance + self._pool.variance)
        drawn = sigmoid(score + request.own.mean + request.chance * std)
        if self._learns:
            request.typical.see(mean)
            self._typical.see(mean)
        parent = request.node(offer.parent)
        return Siblings(parent=parent, drawn=drawn, expected=mean)

    def _best(
        self,
        request_ids: Sequence[RequestId],
        drawn: list[float],
        expected: list[float],
        prices: Prices,
    ) -> Allocation:
        """Over this level's tokens, and the later ones they may lead to."""
        count = len(drawn)
        levels = min(max(_LOOK_AHEAD // count, 1), self._ceiling - self._round.level)
        thetas = [self._requests[request_id].typical.mean for request_id in request_ids]
        if count == 1:
            return best_chain(drawn[0], expected[0], theta=thetas[0], levels=levels, prices=prices)
        order: list[Entry] = []
        for index, (survival, by_mean) in enumerate(zip(drawn, expected, strict=True)):
            for level in range(max(levels, 1)):
                order.append((-survival, level, index, -by_mean))
                survival *= thetas[index]
                by_mean *= thetas[index]
        order.sort()
        return best_allocation(order, prices)

    def _prices(self, count: int, *, given: int, guess_weight: float) -> Prices:
        """`guess_weight`: how much of the exit head's work this level has still to pay."""
        turn, costs = self._round, self._costs
        steps = costs.steps(given + count)
        part = 1.0 - costs.guess_share * (1.0 - guess_weight)
        rows = turn.num_known + turn.num_drafted + given
        most = count * max(_LOOK_AHEAD // count, 1)
        return Prices(
            rate=turn.rate,
            first_s=[part * seconds for seconds in steps[given : given + count + 1]],
            later_s=steps,
            verify_s=costs.verify_from(rows, most, turn.num_requests),
            drafting_s=turn.drafting_s,
            overlapped=turn.overlapped,
        )

    def _close_level(self, *, asked: int, taken: int) -> None:
        """Guesses that were looked at and not drafted have cost the exit head's work, too."""
        turn, costs = self._round, self._costs
        share = costs.guess_share
        turn.drafting_s += share * costs.step(asked) + (1.0 - share) * costs.step(taken)
        turn.num_drafted += taken
        turn.level += 1

    # -- verdicts -------------------------------------------------------------------------------

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Verdicts of one round or of a part of it; requests that are not ours are passed over."""
        for outcome in outcomes:
            request = self._requests.get(outcome.request_id)
            if request is None:
                continue
            for evidence, accepted in judged_tokens([outcome]):
                self._learn(request, evidence, accepted)
            self._ranks.observe(outcome)
            turn, request.turn = request.turn, None
            if turn is not None:
                # The others of the round bring a token each.
                self._trust.observe(
                    came=outcome.num_accepted + turn.num_requests / turn.num_ours,
                    promised=turn.promise * turn.seconds(self._costs) / turn.num_ours,
                    share=1.0 / turn.num_ours,
                )

    def _learn(self, request: _Request, evidence: Evidence, accepted: bool) -> None:
        score = logit(self._calibrator.probability(evidence))
        pool = self._pool.mean
        self._pool.observe(score + request.own.mean, accepted=accepted)
        request.own.observe(score + pool, accepted=accepted)
