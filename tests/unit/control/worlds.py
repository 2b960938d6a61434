"""Simulated texts with known acceptance probabilities, for testing controllers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.base import Controller
from eesd_dist.control.belief import Belief
from eesd_dist.control.chain_rule import ChainReport, follow
from eesd_dist.control.cost import CostModel
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.tree_growth import Offer
from eesd_dist.types import Evidence, Outcome, RequestId

Text = list[tuple[bool, float]]

ONE = RequestId("one")


def outcome(drafted: int, accepted: int, evidence: Iterable[Evidence] = ()) -> Outcome:
    return Outcome(
        request_id=ONE, num_drafted=drafted, num_accepted=accepted, evidence=tuple(evidence)
    )


def evidence(top1_prob: float = 0.5, *, depth: int = 0) -> Evidence:
    """Returns a gap that is as informative as the probability."""
    p = min(max(top1_prob, 1e-3), 1.0 - 1e-3)
    gap = math.expm1(max(math.log(p / (1.0 - p)) + 4.0, 0.0) / 3.0)
    return Evidence(depth=depth, top1_prob=top1_prob, gap=gap)


class Alone:
    """One request of a `DraftPolicy` as a controller, for any registered name."""

    def __init__(
        self,
        name: str,
        *,
        belief: Belief | None = None,
        cost: CostModel | None = None,
        **config: Any,
    ) -> None:
        self.policy = DraftPolicy(
            speculation=SpeculationConfig(**config), cost=cost, calibrator=None
        )
        self.policy.admit(ONE, name, belief or Belief())
        self.begin_round()

    @property
    def needs_probs(self) -> bool:
        return self.policy.needs_probs([ONE])

    def begin_round(self) -> None:
        self._drafted = 0
        self.policy.begin_round([ONE])

    def keep_drafting(self, evidence: Evidence) -> bool:
        offer = Offer(request_id=ONE, evidence=evidence, parent=self._drafted - 1)
        (is_chosen,) = self.policy.choose([offer])
        self._drafted += is_chosen
        return is_chosen

    def observe(self, outcome: Outcome) -> None:
        self.policy.observe([outcome])


def draft_length(controller: Controller, *, ceiling: int, top1_prob: float = 0.5) -> int:
    """Returns the draft length of one round, with the same evidence for every token."""
    controller.begin_round()
    for depth in range(ceiling):
        if not controller.keep_drafting(evidence(top1_prob, depth=depth)):
            return depth
    return ceiling


def text(rng: Random, *, ease: float, spread: float, num_tokens: int) -> Text:
    """Returns (accepted?, top-1 probability) of tokens, which differ in difficulty."""
    tokens = []
    for _ in range(num_tokens):
        score = rng.gauss(ease, spread)
        tokens.append((rng.random() < _sigmoid(score), _sigmoid(score + rng.gauss(0.0, 0.7))))
    return tokens


def decode(controller: Controller, tokens: Text, *, ceiling: int) -> list[Outcome]:
    """Returns the outcome of every round needed for the text, each observed by the controller."""
    outcomes, at = [], 0
    while at + ceiling + 1 < len(tokens):
        seen: list[Evidence] = []
        controller.begin_round()
        while len(seen) < ceiling:
            guess = evidence(tokens[at + len(seen)][1], depth=len(seen))
            if not controller.keep_drafting(guess):
                break
            seen.append(guess)
        accepted = 0
        while accepted < len(seen) and tokens[at + accepted][0]:
            accepted += 1
        outcomes.append(outcome(len(seen), accepted, seen))
        controller.observe(outcomes[-1])
        at += accepted + 1
    return outcomes


def _sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score))


@dataclass(slots=True)
class Served:
    """Results of a sequence of texts that were served in batches."""

    tokens: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    """Of every draft, in the order of rounds."""
    num_guesses: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def serve(
    policy: DraftPolicy,
    texts: Sequence[Text],
    *,
    cost: CostModel,
    max_running: int,
    ceiling: int = 8,
    belief: Belief | None = None,
    name: str | None = None,
    by_rules: bool = False,
) -> Served:
    """Asks the policy level by level or for its rules, answers with verdicts from the texts, and
    adds up the seconds of the cost model, including guesses that were computed but not drafted."""
    served, waiting = Served(), list(enumerate(texts))
    live: dict[RequestId, tuple[Text, int]] = {}
    share = cost.guess_batch(1) / cost.draft_step_s
    while waiting or live:
        while waiting and len(live) < max_running:
            number, tokens = waiting.pop(0)
            request_id = RequestId(str(number))
            live[request_id] = (tokens, 0)
            policy.admit(request_id, name, belief or Belief())
        drafts: dict[RequestId, list[Evidence]] = {request_id: [] for request_id in live}
        served.seconds += cost.known_batch(len(live))
        active = policy.begin_round(list(live))
        draft = _draft_by_rules if by_rules else _draft_by_levels
        drafting = {request_id: live[request_id] for request_id in live if request_id in active}
        for num_guessed, num_drafted in draft(policy, drafts, drafting, ceiling):
            served.num_guesses += num_guessed
            served.seconds += share * cost.draft_batch(num_guessed)
            served.seconds += (1.0 - share) * cost.draft_batch(num_drafted)
        rows = len(live) + sum(map(len, drafts.values()))
        served.seconds += cost.verify_batch(rows, len(live))
        _judge(policy, drafts, live, served)
    return served


_Live = dict[RequestId, tuple[Text, int]]
_Drafts = dict[RequestId, list[Evidence]]


def _draft_by_levels(
    policy: DraftPolicy, drafts: _Drafts, live: _Live, ceiling: int
) -> Iterator[tuple[int, int]]:
    """Yields the guesses of each level, and how many of them were taken."""
    active = list(live)
    while active := _wanted(policy, active, drafts, live, ceiling):
        offers = [
            Offer(
                request_id=request_id,
                evidence=evidence(
                    live[request_id][0][live[request_id][1] + len(drafts[request_id])][1],
                    depth=len(drafts[request_id]),
                ),
                parent=len(drafts[request_id]) - 1,
            )
            for request_id in active
        ]
        choices = policy.choose(offers)
        for offer, is_chosen in zip(offers, choices, strict=True):
            if is_chosen:
                drafts[offer.request_id].append(offer.evidence)
        yield len(active), sum(choices)
        active = [o.request_id for o, is_chosen in zip(offers, choices, strict=True) if is_chosen]


def _draft_by_rules(
    policy: DraftPolicy, drafts: _Drafts, live: _Live, ceiling: int
) -> Iterator[tuple[int, int]]:
    rules = policy.chain_rules(dict.fromkeys(live, 0.0))
    reports: dict[RequestId, ChainReport] = {}
    for request_id, (tokens, at) in live.items():
        upcoming = enumerate(tokens[at : at + ceiling])
        seen = [evidence(prob, depth=depth) for depth, (_, prob) in upcoming]
        reports[request_id] = follow(rules[request_id], [guess.gap for guess in seen])
        drafts[request_id] = seen[: reports[request_id].num_drafted]
    policy.report(reports)
    for depth in range(max((len(report.means) for report in reports.values()), default=0)):
        guessed = sum(len(report.means) > depth for report in reports.values())
        yield guessed, sum(report.num_drafted > depth for report in reports.values())


def _wanted(
    policy: DraftPolicy,
    active: list[RequestId],
    drafts: _Drafts,
    live: _Live,
    ceiling: int,
) -> list[RequestId]:
    room = [
        request_id
        for request_id in active
        if len(drafts[request_id]) < ceiling
        and live[request_id][1] + len(drafts[request_id]) < len(live[request_id][0])
    ]
    worth = policy.worth_a_guess(room)
    return [request_id for request_id in room if request_id in worth]


def _judge(
    policy: DraftPolicy,
    drafts: _Drafts,
    live: _Live,
    served: Served,
) -> None:
    outcomes = []
    for request_id, seen in drafts.items():
        tokens, at = live[request_id]
        accepted = 0
        while accepted < len(seen) and tokens[at + accepted][0]:
            accepted += 1
        outcomes.append(
            Outcome(
                request_id=request_id,
                num_drafted=len(seen),
                num_accepted=accepted,
                evidence=tuple(seen),
            )
        )
        served.tokens += min(accepted + 1, len(tokens) - at)
        served.lengths.append(len(seen))
        live[request_id] = (tokens, at + accepted + 1)
    policy.observe(outcomes)
    for request_id in drafts:
        tokens, at = live[request_id]
        if at >= len(tokens):
            del live[request_id]
            policy.end(request_id)
