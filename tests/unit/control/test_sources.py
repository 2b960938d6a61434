"""The source of drafts: the exit head or prompt lookup, by what each has gained."""

from dataclasses import replace
from random import Random

import pytest

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.goodput.lookup import RequestSources, Sources, class_of
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.types import Outcome, RequestId

COST = CostModel(
    draft_step_s=0.1, verify_s=tuple(1.0 + 0.05 * i for i in range(9)), round_s=0.1, guess_s=0.05
)
PRICES = [0.1 * count for count in range(9)]
ONE = RequestId("one")


def verdict(num_drafted: int, num_accepted: int) -> Outcome:
    return Outcome(
        request_id=ONE, num_drafted=num_drafted, num_accepted=num_accepted, is_lookup=True
    )


def lengths(sources: Sources, request: RequestSources, context: int, count: int) -> list[int]:
    rng = Random(3)
    return [sources.length(request, context, PRICES, rng) for _ in range(count)]


def test_contexts_have_classes() -> None:
    assert [class_of(context) for context in range(2, 13)] == [0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4]


def test_lookups_that_are_right_are_drafted_and_get_longer() -> None:
    sources, request = Sources(), RequestSources()
    for _ in range(30):
        lengths(sources, request, 9, 1)
        sources.observe_lookup(request, verdict(8, 8))
        sources.observe_head(request, 1.0)
    counts = lengths(sources, request, 9, 100)
    assert counts.count(8) > 90


def test_lookups_that_fail_are_given_up_in_their_class_alone() -> None:
    sources, request = Sources(), RequestSources()
    for _ in range(30):
        lengths(sources, request, 2, 1)
        sources.observe_lookup(request, verdict(3, 0))
        sources.observe_head(request, 1.0)
    assert lengths(sources, request, 2, 200).count(0) > 190
    assert lengths(sources, request, 9, 200).count(0) < 40


def test_a_head_that_gains_more_is_kept() -> None:
    sources, request = Sources(), RequestSources()
    for _ in range(60):
        lengths(sources, request, 3, 1)
        sources.observe_lookup(request, verdict(4, 2))
        sources.observe_head(request, 5.0)
    assert lengths(sources, request, 3, 200).count(0) > 190


def test_what_one_request_taught_helps_the_next() -> None:
    sources, first = Sources(), RequestSources()
    for _ in range(60):
        lengths(sources, first, 3, 1)
        sources.observe_lookup(first, verdict(4, 0))
        sources.observe_head(first, 0.5)
    fresh = Sources()
    fresh.observe_head(RequestSources(), 0.5)
    taught = lengths(sources, RequestSources(), 3, 300).count(0)
    assert taught > lengths(fresh, RequestSources(), 3, 300).count(0) + 50


def _policy(**config: object) -> DraftPolicy:
    policy = DraftPolicy(
        speculation=SpeculationConfig(**config),  # type: ignore[arg-type]
        cost=COST,
        calibrator=Calibrator(log_gap=1.0, logit_top1=0.0),
    )
    policy.admit(ONE, None, Belief())
    return policy


def rounds(policy: DraftPolicy, count: int, *, accepts: bool) -> list[int]:
    """Returns how many tokens of lookups were drafted in each round; the head drafts nothing."""
    counts: list[int] = []
    for _ in range(count):
        policy.begin_round([ONE])
        length = policy.lookup_length(ONE, lambda: (4, 8))
        counts.append(length)
        if length:
            policy.observe([verdict(length, length if accepts else 0)])
        else:
            policy.observe([Outcome(request_id=ONE, num_drafted=0, num_accepted=0)])
    return counts


@pytest.mark.parametrize("accepts", [True, False])
def test_goodput_learns_whether_lookups_pay(accepts: bool) -> None:
    counts = rounds(_policy(), 120, accepts=accepts)
    last_counts = counts[60:]
    assert (sum(last_counts) / len(last_counts) > 7) if accepts else (last_counts.count(0) > 45)


def test_lookups_pay_for_what_they_add_to_a_round() -> None:
    def lengths_of_a_round(lookup_s: float) -> list[int]:
        policy = DraftPolicy(
            speculation=SpeculationConfig(),
            cost=replace(COST, lookup_s=lookup_s),
            calibrator=Calibrator(log_gap=1.0, logit_top1=0.0),
        )
        names = [ONE, RequestId("two")]
        for name in names:
            policy.admit(name, None, Belief())
        policy.begin_round(names)
        return [policy.lookup_length(name, lambda: (9, 2)) for name in names]

    assert lengths_of_a_round(0.0) == [2, 2]
    assert lengths_of_a_round(100.0 * COST.verify_s[0]) == [0, 0]


def test_ngram_drafts_what_is_found_up_to_its_length_and_nothing_of_the_head() -> None:
    policy = _policy(controller="ngram", fixed_length=3)
    policy.begin_round([ONE])
    assert [policy.lookup_length(ONE, lambda n=n: (5, n)) for n in (0, 2, 8)] == [0, 2, 3]
    assert policy.worth_a_guess([ONE]) == frozenset()
    assert len(policy.chain_rules({ONE: 0.0})[ONE].prices) == 1


def test_no_other_controller_drafts_lookups_and_they_can_be_switched_off() -> None:
    assert rounds(_policy(prompt_lookup=False), 10, accepts=True) == [0] * 10
    for controller in ("fixed", "smartspec", "calibration"):
        assert rounds(_policy(controller=controller), 10, accepts=True) == [0] * 10


def test_the_others_do_not_search_the_text() -> None:
    def find() -> tuple[int, int]:
        raise AssertionError("searched in vain")

    for config in ({"controller": "fixed"}, {"controller": "smartspec"}, {"prompt_lookup": False}):
        policy = _policy(**config)
        policy.begin_round([ONE])
        assert policy.lookup_length(ONE, find) == 0
    policy = _policy()
    policy.begin_round([ONE])
    assert policy.lookup_length(ONE, lambda: (0, 0)) == 0


def test_verdicts_on_lookups_teach_nothing_about_the_head() -> None:
    judged = verdict(4, 1)
    assert judged.num_first_accepted == judged.num_first_rejected == 0
    belief = Belief(alpha=3.0, beta=2.0)
    assert belief.after(judged).mean == belief.mean
