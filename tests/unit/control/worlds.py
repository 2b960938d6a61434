"""A world in which tokens are accepted by known chances, to try controllers in."""

import math
from collections.abc import Iterable
from random import Random

from eesd_dist.control import Controller
from eesd_dist.types import Evidence, Outcome, RequestId

ONE = RequestId("one")


def outcome(drafted: int, accepted: int, evidence: Iterable[Evidence] = ()) -> Outcome:
    return Outcome(
        request_id=ONE, num_drafted=drafted, num_accepted=accepted, evidence=tuple(evidence)
    )


def evidence(top1_prob: float = 0.5, *, depth: int = 0) -> Evidence:
    return Evidence(
        depth=depth, top1_prob=top1_prob, top2_margin=2 * abs(top1_prob - 0.5), entropy=0.5
    )


def draft_length(controller: Controller, *, ceiling: int, top1_prob: float = 0.5) -> int:
    """One round's draft, with the same evidence for every token."""
    controller.begin_round()
    for depth in range(ceiling):
        if not controller.keep_drafting(evidence(top1_prob, depth=depth)):
            return depth
    return ceiling


def text(rng: Random, *, ease: float, spread: float, num_tokens: int) -> list[tuple[bool, float]]:
    """(accepted?, top-1 probability) of a text whose tokens differ in difficulty."""
    tokens = []
    for _ in range(num_tokens):
        score = rng.gauss(ease, spread)
        tokens.append((rng.random() < _sigmoid(score), _sigmoid(score + rng.gauss(0.0, 0.7))))
    return tokens


def decode(
    controller: Controller, tokens: list[tuple[bool, float]], *, ceiling: int
) -> list[Outcome]:
    """Every round it takes to get through the text, each observed."""
    outcomes, at = [], 0
    while at + ceiling + 1 < len(tokens):
        seen: list[Evidence] = []
        controller.begin_round()
        while len(seen) < ceiling:
            here = evidence(tokens[at + len(seen)][1], depth=len(seen))
            if not controller.keep_drafting(here):
                break
            seen.append(here)
        accepted = 0
        while accepted < len(seen) and tokens[at + accepted][0]:
            accepted += 1
        outcomes.append(outcome(len(seen), accepted, seen))
        controller.observe(outcomes[-1])
        at += accepted + 1
    return outcomes


def _sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score))
