"""Round of `goodput`: decides which guesses of each level to compute and which to draft."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from eesd_dist.control.base import RoundLoad
from eesd_dist.control.calibrator import logit
from eesd_dist.control.chain_rule import (
    LOOK,
    NO,
    NO_ODDS,
    PROBE,
    YES,
    ChainReport,
    ChainRule,
    Doubles,
    has_value,
    of_length,
    takes,
    wants_guess,
)
from eesd_dist.control.goodput.costs import CostTable
from eesd_dist.control.goodput.estimates import Exploration
from eesd_dist.control.goodput.forecast import Forecast, RequestForecast
from eesd_dist.control.goodput.lookup import RequestSources, Sources
from eesd_dist.control.survival import ROOT, Node, Siblings
from eesd_dist.control.tree_growth import Offer
from eesd_dist.types import Outcome, RequestId

_NO_DRAFT = of_length(0)
_GOING_ON = 0.5
"""Beyond the common length, the part of the requests that could go on that do: by their guesses."""
_LOOKUP_STEPS, _LOOKUP_ROW_STEPS = 0.2, 0.1
"""Cost of drafting a lookup and each of its tokens, in draft steps: its rows run through the layers
together, without the exit head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSetup:
    """Inputs shared by all rounds of a batch."""

    costs: CostTable
    forecast: Forecast
    exploration: Exploration
    sources: Sources
    max_draft_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """Draft of one request so far."""

    request: RequestForecast
    chance: float
    """The round's Thompson draw, in standard deviations."""
    sources: RequestSources
    rng: Random
    """The request's."""
    means: tuple[float, ...] = ()
    """Forecast of each guess that was made by the chain rule."""
    shift: float = 0.0
    """The drifts in these forecasts, in log-odds."""
    nodes: list[Node] = field(default_factory=list)
    """Survival of the drafted tokens, in the order they were taken."""
    best: Node = ROOT
    """The likeliest node of the newest level."""
    rule: ChainRule | None = None
    """Decides level by level; None until the first level."""
    answer: int = YES
    """Answer of the rule to whether this level's guess is wanted."""
    spent: float = 0.0
    """Tokens that draws above the mean have cost."""

    @property
    def mean(self) -> float:
        """Expected acceptance of the request's next token before its guess is computed."""
        return self.request.running_mean.mean

    def node(self, index: int) -> Node:
        return self.nodes[index] if index >= 0 else ROOT


class GoodputRound:
    """Decisions of one round: tracks its cost so far and the value of a second."""

    def __init__(
        self,
        setup: RoundSetup,
        load: RoundLoad,
        drafts: Mapping[RequestId, Draft],
        *,
        promise_ratio: float,
        num_rested: int = 0,
    ) -> None:
        """`num_rested`: rounds of requests that were left out since the round before."""
        self._setup = setup
        self._costs = setup.costs
        self._load = load
        self._drafts = drafts
        self._num_ours = len(drafts)
        self._drafting_s = self._costs.known(load.num_known)
        self._num_drafted = 0
        self._num_looked_up = 0
        """Rows of tokens found by prompt lookup."""
        self._level = 0
        self._shares: dict[tuple[int, int, int], list[float]] = {}
        """Results of `_shares_s`, by the requests that share, the rows before their drafts, and
        the length."""
        plain_s, with_probe_s = self._rounds_s(load.num_known)[:2]
        decoding_s = self._rounds_s(load.num_decoding)
        self._prefill_s = plain_s - decoding_s[0]
        """Seconds of the rows of prompts, which are computed in any case: a second is worth what it
        is in rounds without them."""
        plain = load.num_decoding / decoding_s[0]
        self._theta = sum(draft.mean for draft in drafts.values()) / len(drafts)
        """Acceptance of the mean request."""
        self._promise, self._common_length = self._best_promise(plain, decoding_s)
        self._rate = max(self._promise * promise_ratio, plain)
        """Value of a second, in tokens."""
        self._probe_price = self._rate * (with_probe_s - plain_s)
        """Price in tokens of one drafted token for every request."""
        setup.exploration.earn(
            num_requests=load.num_decoding + num_rested, probe_price=self._probe_price
        )

    @property
    def share(self) -> float:
        """Share of the round that belongs to one request."""
        return 1.0 / self._num_ours

    @property
    def promised(self) -> float:
        """Expected tokens of one request's share of the round."""
        return self._promise * (self._seconds() - self._prefill_s) / self._num_ours

    def scores_of(self, request_id: RequestId) -> list[float]:
        """Returns the calibrated log-odds of the guesses that the chain rule made."""
        draft = self._drafts[request_id]
        return [logit(mean) - draft.shift for mean in draft.means]

    def yielded(self, num_accepted: int) -> float:
        """Returns the tokens of one request's share, with one per request of other controllers."""
        return num_accepted + self._load.num_decoding / self._num_ours

    def lookup_length(self, request_id: RequestId, find: Callable[[], tuple[int, int]]) -> int:
        context, max_length = find()
        if not max_length:
            return 0
        costs, load, draft = self._costs, self._load, self._drafts[request_id]
        rows = load.num_known + self._num_looked_up
        verify_s = costs.verify_from(rows, max_length, load.num_requests)
        prices = [
            self._rate * (seconds - verify_s[0] + self._looking_up_s(count))
            for count, seconds in enumerate(verify_s)
        ]
        length = self._setup.sources.length(draft.sources, context, prices, draft.rng)
        self._drafting_s += self._looking_up_s(length)
        self._num_looked_up += length
        return length

    def _looking_up_s(self, count: int) -> float:
        """Returns the seconds of drafting for one more lookup, of so many tokens."""
        if not count:
            return 0.0
        steps = _LOOKUP_STEPS + _LOOKUP_ROW_STEPS * count
        return self._costs.lookup_s + steps * self._costs.step(1)

    def head_gain(self, outcome: Outcome) -> float:
        """Returns the tokens of a draft of the exit head above its share of the round's price."""
        count = outcome.num_drafted
        share_s = self._shares_s(count, sharing=self._num_ours)[count] if count else 0.0
        return outcome.num_accepted - self._rate * share_s

    def has_rules(self, request_ids: Iterable[RequestId]) -> bool:
        """Returns False if the calibration reads more than the score gap."""
        return not self._setup.forecast.needs_probs

    def chain_rules(self, temperatures: Mapping[RequestId, float]) -> Mapping[RequestId, ChainRule]:
        """Returns the decisions of each request in advance, by its share of the round's price."""
        prices, common = self._share_prices(len(temperatures)), self._common_rule
        drafts = [self._drafts[request_id] for request_id in temperatures]
        rules = dict.fromkeys(temperatures, _NO_DRAFT)
        if common.probes:
            has_guess = [True] * len(drafts)
        else:  # those that draft nothing are found for all requests together
            means = np.array([draft.mean for draft in drafts])
            pays = has_value(means, prices, 0.0)
            if common.looks:
                hopeful = np.minimum(means + self._setup.forecast.spread, 1.0)
                pays |= has_value(hopeful, prices, common.guess_price)
            has_guess = pays.tolist()
        for (request_id, temperature), draft, guesses in zip(
            temperatures.items(), drafts, has_guess, strict=True
        ):
            if guesses:
                rules[request_id] = rule = self._rule_of(draft, common, prices, temperature)
                draft.shift = rule.shift
        return rules

    def report(self, reports: Mapping[RequestId, ChainReport]) -> None:
        """Takes what a drafter did by the chain rules."""
        exploration, share = self._setup.exploration, self._costs.guess_share
        step_s = self._costs.step(self._num_ours) / self._num_ours
        guess_price = self._rate * share * step_s
        for request_id, report in reports.items():
            draft = self._drafts[request_id]
            draft.means = report.means
            for mean in report.means:
                self._setup.forecast.see(draft.request, mean)
            exploration.drafting -= report.spent + self._probe_price * report.probed * self.share
            for _ in range(report.num_looks):
                exploration.looked(report.looked / report.num_looks, price=guess_price)
            guesses = share * len(report.means) + (1.0 - share) * report.num_drafted
            self._drafting_s += step_s * guesses
            self._num_drafted += report.num_drafted
        if any(report.means for report in reports.values()):
            self._drafting_s += self._costs.start_s

    def worth_a_guess(self, request_ids: Sequence[RequestId]) -> frozenset[RequestId]:
        """Returns the requests to guess for, judged by the running mean of each request."""
        return frozenset(i for i in request_ids if self._wants_guess(self._drafts[i]))

    def choose(self, offers: Sequence[Offer]) -> list[bool]:
        """Decides the likeliest token of each request by its rule, and the others of a tree by the
        price of their rows."""
        nodes = self._nodes(offers)
        likeliest: dict[RequestId, int] = {}
        for at, offer in enumerate(offers):
            best = likeliest.setdefault(offer.request_id, at)
            if nodes[at] > nodes[best]:
                likeliest[offer.request_id] = at
        drafted = [False] * len(offers)
        for request_id, at in likeliest.items():
            drafted[at] = self._takes(self._drafts[request_id], nodes[at])
        for at, offer in enumerate(offers):
            best = likeliest[offer.request_id]
            if at != best and drafted[best]:
                drafted[at] = nodes[at].expected > self._row_price(sum(drafted))
        for offer, node, is_drafted in zip(offers, nodes, drafted, strict=True):
            if is_drafted:
                self._drafts[offer.request_id].nodes.append(node)
        for request_id, at in likeliest.items():
            self._drafts[request_id].best = nodes[at]
        self._close_level(guessed=sum(offer.rank == 0 for offer in offers), drafted=sum(drafted))
        return drafted

    def _share_prices(self, sharing: int) -> Doubles:
        """Returns the price in tokens of one request's draft of 0, 1, 2, ... tokens, of so many."""
        return self._rate * np.array(self._shares_s(0, sharing=sharing))

    def _shares_s(self, num_drafted: int, *, sharing: int) -> list[float]:
        """Returns one request's share of a round's seconds, by the length of its draft from 0 to
        the longest chain, and to `num_drafted` at least, which a tree may have in fewer levels.

        Up to the length that pays for all of them together, a level is there anyway if another of
        the `sharing` requests gets that far: a token then costs what one more in the level costs,
        little on a GPU, and otherwise the level. Beyond that length the requests that go on pay in
        equal parts.
        """
        load, rows = self._load, self._load.num_known + self._num_looked_up
        longest = max(self._setup.max_draft_tokens, num_drafted)
        shares_s = self._shares.get((sharing, rows, longest))
        if shares_s is not None:
            return shares_s
        steps_s = self._costs.steps(sharing + 1)
        verify_s = self._costs.verify_from(rows, sharing * longest + 1, load.num_requests)
        first_row = rows

        def round_s(tokens: int) -> float:
            """Returns the seconds with this level's tokens, `sharing` at most."""
            start_s = self._costs.start_s if rows + tokens > first_row else 0.0
            level_s = start_s + steps_s[tokens]
            return self._both(drafting_s + level_s, verify_s[rows - first_row + tokens])

        drafting_s, reached, shares_s = self._costs.known(load.num_known), 1.0, [0.0]
        self._shares[sharing, rows, longest] = shares_s
        for level in range(longest):
            count = max(round(sharing * reached), 1)
            if level < self._common_length:
                next_s = round_s(max(count, 2)) - round_s(max(count, 2) - 1)
                p_only = (1.0 - reached) ** (sharing - 1)
                share_s = p_only * (round_s(1) - round_s(0)) + (1.0 - p_only) * next_s
            else:
                share_s = (round_s(count) - round_s(0)) / max(_GOING_ON * count, 1.0)
            shares_s.append(shares_s[-1] + share_s)
            drafting_s += steps_s[count]
            rows += count
            reached *= self._theta
        return shares_s

    @property
    def _common_rule(self) -> ChainRule:
        """The part of the rule that is the same for all requests, by the budgets as they are."""
        costs, exploration = self._costs, self._setup.exploration
        guesses_s = costs.start_s + costs.guess_share * costs.step(self._num_ours)
        guesses_price = self._rate * guesses_s
        return _NO_DRAFT._replace(
            guess_price=guesses_price * self.share,
            looks=exploration.may_look(guesses_price),
            probes=exploration.drafting >= self._probe_price,
            optimism=exploration.drafting * self.share,
        )

    def _rule_of(
        self, draft: Draft, common: ChainRule, prices: Doubles, temperature: float | None
    ) -> ChainRule:
        """Returns a request's rule; without a temperature, it does not forecast guesses."""
        forecast = self._setup.forecast
        odds, shift, deviation = NO_ODDS, 0.0, 0.0
        if temperature is not None:
            odds, shift, std = forecast.at(draft.request, temperature)
            deviation = draft.chance * std
        mean = draft.mean
        return common._replace(
            prices=prices,
            mean=mean,
            hopeful=min(mean + forecast.spread, 1.0),
            odds=odds,
            shift=shift,
            deviation=deviation,
        )

    def _wants_guess(self, draft: Draft) -> bool:
        rule = self._level_rule(draft)
        draft.answer = wants_guess(rule, self._level, draft.best.expected)
        return draft.answer != NO

    def _takes(self, draft: Draft, node: Node) -> bool:
        """Returns whether to draft a request's likeliest token of this level."""
        exploration, rule = self._setup.exploration, self._level_rule(draft)
        if draft.answer == PROBE:
            exploration.drafting -= self._probe_price * self.share
            return True
        left = rule.optimism - draft.spent
        is_drafted, spent, value = takes(rule, self._level, node.drawn, node.expected, left)
        draft.spent += spent
        exploration.drafting -= spent
        if draft.answer == LOOK:
            exploration.looked(max(value, 0.0) - rule.guess_price, price=rule.guess_price)
        return bool(is_drafted)

    def _level_rule(self, draft: Draft) -> ChainRule:
        if draft.rule is None:
            draft.rule = self._rule_of(
                draft, self._common_rule, self._share_prices(self._num_ours), None
            )
        return draft.rule

    def _row_price(self, count: int) -> float:
        """Returns the price in tokens of one more token in this level, which has `count`."""
        rows = self._load.num_known + self._num_looked_up + self._num_drafted + count

        def seconds(more: int) -> float:
            drafting_s = self._drafting_s + self._costs.step(count + more)
            return self._both(drafting_s, self._costs.verify(rows + more, self._load.num_requests))

        return self._rate * (seconds(1) - seconds(0))

    def _rounds_s(self, num_rows: int) -> Sequence[float]:
        """Returns the seconds of rounds with so many known rows, by the length of all drafts."""
        return self._costs.rounds(
            self._num_ours,
            self._setup.max_draft_tokens,
            num_rows=num_rows,
            requests=self._load.num_requests,
            overlapped=self._load.overlapped,
        )

    def _seconds(self) -> float:
        """Returns the seconds of the round so far."""
        rows = self._load.num_known + self._num_looked_up + self._num_drafted
        return self._both(self._drafting_s, self._costs.verify(rows, self._load.num_requests))

    def _both(self, drafting_s: float, verifying_s: float) -> float:
        if self._load.overlapped:
            return max(drafting_s, verifying_s)
        return drafting_s + verifying_s

    def _best_promise(self, plain: float, seconds: Sequence[float]) -> tuple[float, int]:
        """Returns tokens per second of the mean request at the best common length, so that the
        value of a second follows the load immediately, and that length. `seconds`: by it, from
        0."""
        best, best_length = plain, 0
        tokens, survival = float(self._load.num_decoding), 1.0
        for length, round_s in enumerate(seconds[1:], start=1):
            survival *= self._theta
            tokens += self._num_ours * survival
            if tokens / round_s > best:
                best, best_length = tokens / round_s, length
        return best, best_length

    def _nodes(self, offers: Sequence[Offer]) -> list[Node]:
        """Returns the survival of each offer. A sibling's is that of all before it being wrong, and
        at most that of the one before it, so that they are drafted in order of rank."""
        forecast = self._setup.forecast
        nodes: list[Node] = []
        families: dict[tuple[RequestId, int], Siblings] = {}
        for offer in offers:
            key = (offer.request_id, offer.parent)
            family = families.get(key)
            if family is None:
                draft = self._drafts[offer.request_id]
                family = families[key] = forecast.siblings(
                    draft.request,
                    offer.evidence,
                    parent=draft.node(offer.parent),
                    chance=draft.chance,
                )
            nodes.append(family.next_node(forecast.share_of(offer.rank)))
        return nodes

    def _close_level(self, *, guessed: int, drafted: int) -> None:
        """Adds a level's cost; guesses that were not drafted have cost the exit head's time too."""
        costs, share = self._costs, self._costs.guess_share
        self._drafting_s += costs.start_s if guessed and not self._level else 0.0
        self._drafting_s += share * costs.step(guessed) + (1.0 - share) * costs.step(drafted)
        self._num_drafted += drafted
        self._level += 1
