"""`goodput` at known acceptance rates: against fixed lengths, plain decoding and its forecasts."""

from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import UNFITTED, Calibrator
from eesd_dist.control.chain_rule import ChainReport, acceptance, follow
from eesd_dist.control.cost import CostModel
from eesd_dist.control.fitting import fit_calibrator
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.tree_growth import Offer
from eesd_dist.types import Branch, Evidence, Outcome, RequestId
from tests.unit.control.worlds import Served, Text, evidence, outcome, serve, text

MEASURED = CostModel(
    draft_step_s=0.97e-3,
    verify_s=(7.43e-3, 7.43e-3, 7.45e-3, 7.45e-3, 7.48e-3, 8.2e-3, 9.4e-3, 9.4e-3, 9.4e-3),
    round_s=0.35e-3,
    guess_s=0.59e-3,
    request_s=1.1e-3,
    verify_rows_s=((18, 12.9e-3), (36, 18.9e-3), (144, 59.9e-3), (288, 116.5e-3)),
    draft_rows_s=((2, 1.1e-3), (4, 1.48e-3), (16, 3.36e-3), (32, 6.3e-3)),
    known_rows_s=((2, 0.43e-3), (4, 0.51e-3), (16, 1.3e-3), (32, 2.4e-3)),
)
"""A profile of the bundled model on two cores."""
CHEAP = CostModel(
    draft_step_s=0.15, verify_s=tuple(1 + 0.03 * i for i in range(9)), round_s=0.1, guess_s=0.08
)
LINEAR = CostModel(
    draft_step_s=0.1, verify_s=tuple(1.0 * i for i in range(1, 10)), round_s=0.05, guess_s=0.06
)
"""The verifier is busy: every row costs as much as a full pass."""
FLAT = CostModel(
    draft_step_s=1.3,
    verify_s=tuple(6.3 + 0.02 * i for i in range(9)),
    round_s=2.6,
    guess_s=0.8,
    verify_rows_s=((18, 6.6), (36, 7.3), (144, 8.5), (288, 11.5)),
    draft_rows_s=((2, 1.3), (16, 1.35), (32, 1.5)),
    known_rows_s=((2, 2.7), (16, 3.1), (32, 3.7)),
)
"""Like a large model on a GPU, in milliseconds: a level costs the same for any batch."""

BY_GAP = Calibrator(log_gap=1.0, logit_top1=0.0)
BY_TRUE_GAP = Calibrator(bias=-4.0, log_gap=3.0, logit_top1=0.0)
"""Of the gaps in these worlds."""


@cache
def calibrator() -> Calibrator:
    """Returns a calibrator fitted to texts of all kinds, as a real one is."""
    rng = Random(77)
    tokens = [
        pair for ease in (3, 1, -2) for pair in text(rng, ease=ease, spread=1.5, num_tokens=1_500)
    ]
    return fit_calibrator([(evidence(p), accepted) for accepted, p in tokens], curved=False)


def _texts(ease: float, count: int, *, length: int = 100, seed: int = 5) -> list[Text]:
    rng = Random(f"{seed}/{ease}")
    return [text(rng, ease=ease, spread=1.5, num_tokens=length) for _ in range(count)]


def _policy(cost: CostModel, controller: str = "goodput", **config: Any) -> DraftPolicy:
    speculation = SpeculationConfig(controller=controller, **config)
    return DraftPolicy(speculation=speculation, cost=cost, calibrator=calibrator())


def _served(cost: CostModel, texts: list[Text], max_running: int, **config: Any) -> Served:
    return serve(_policy(cost, **config), texts, cost=cost, max_running=max_running)


def _fixed(cost: CostModel, texts: list[Text], max_running: int, length: int) -> float:
    served = _served(cost, texts, max_running, controller="fixed", fixed_length=length)
    return served.rate


def _best_fixed(cost: CostModel, texts: list[Text], max_running: int) -> float:
    return max(_fixed(cost, texts, max_running, length) for length in (0, 1, 2, 3, 4, 6, 8))


@pytest.mark.parametrize("cost", [MEASURED, CHEAP], ids=["measured", "cheap"])
@pytest.mark.parametrize(("ease", "max_running"), [(3, 1), (1, 1), (-2, 1), (3, 8), (1, 8)])
def test_in_a_steady_world_it_keeps_up_with_the_best_fixed_length(
    cost: CostModel, ease: float, max_running: int
) -> None:
    texts = _texts(ease, 8 if max_running == 1 else 32)
    rate = _served(cost, texts, max_running).rate
    assert rate > 0.98 * _best_fixed(cost, texts, max_running)


@pytest.mark.parametrize("cost", [MEASURED, CHEAP], ids=["measured", "cheap"])
def test_in_a_mixed_world_it_beats_every_single_length(cost: CostModel) -> None:
    pairs = zip(_texts(3.5, 8), _texts(-2, 8), strict=True)
    texts = [tokens for pair in pairs for tokens in pair]
    assert _served(cost, texts, 1).rate > 1.08 * _best_fixed(cost, texts, 1)


def test_after_a_change_of_class_in_mid_stream_it_beats_every_single_length() -> None:
    for before, after in ((-2, 3), (3, -2)):
        pairs = zip(_texts(before, 4, length=200), _texts(after, 4, length=200), strict=True)
        texts = [tokens + other for tokens, other in pairs]
        assert _served(MEASURED, texts, 1).rate > 1.05 * _best_fixed(MEASURED, texts, 1)


@pytest.mark.parametrize("max_running", [1, 4, 32])
@pytest.mark.parametrize("world", ["never", "never, and sure of it", "every row costs a pass"])
def test_where_nothing_is_to_be_gained_it_is_as_fast_as_plain_decoding(
    world: str, max_running: int
) -> None:
    cost = LINEAR if world.startswith("every") else MEASURED
    claimed = 0.9 if world.endswith("sure of it") else 0.4
    count, length = max(4, 2 * max_running), 200
    texts: list[Text] = [[(False, claimed)] * length for _ in range(count)]
    if cost is LINEAR:
        texts = _texts(1, count, length=length)
    rate = _served(cost, texts, max_running).rate
    assert rate > 0.98 * _fixed(cost, texts, max_running, 0)


def test_where_nothing_is_to_be_gained_the_exit_head_is_left_alone() -> None:
    served = _served(MEASURED, [[(False, 0.3)] * 1_500], 1)
    assert served.num_guesses < 0.08 * len(served.lengths)
    assert served.lengths.count(0) > 0.95 * len(served.lengths)


def test_after_long_failure_it_finds_out_that_a_text_became_easy() -> None:
    text_: Text = [(False, 0.9)] * 300 + [(True, 0.9)] * 900
    served = _served(MEASURED, [text_], 1)
    assert sum(served.lengths[-40:]) / 40 > 5
    assert sum(served.lengths[150:290]) / 140 < 0.2


def test_a_request_that_drafts_nothing_rests_longer_and_longer() -> None:
    policy, request = _admitted(_policy(MEASURED), 1), RequestId("0")

    def round_of(*, drafts: bool) -> bool:
        """Returns whether the request was asked."""
        is_active = request in policy.begin_round([request])
        if is_active:
            policy.worth_a_guess([request])
        else:
            assert policy.worth_a_guess([request]) == set()
            assert policy.lookup_length(request, lambda: (9, 5)) == 0
        count = int(drafts and is_active)
        judged = (evidence(0.8),) * count
        if is_active:
            policy.observe(
                [Outcome(request_id=request, num_drafted=count, num_accepted=0, evidence=judged)]
            )
        return is_active

    turns = [at for at in range(80) if round_of(drafts=False)]
    # The first round has the number 1: rests of 16 rounds end at multiples of 16.
    assert turns == [0, 1, 2, 3, 4, 5, 7, 15, 31, 47, 63, 79]
    while not round_of(drafts=True):
        pass
    assert [round_of(drafts=True) for _ in range(20)] == [True] * 20


def test_a_warm_prior_saves_the_lessons_of_the_first_rounds() -> None:
    hopeless = Belief(alpha=2.0, beta=200.0)
    texts: list[Text] = [[(False, 0.6)] * 30]
    cold = serve(_policy(MEASURED), texts, cost=MEASURED, max_running=1)
    warm = serve(_policy(MEASURED), texts, cost=MEASURED, max_running=1, belief=hopeless)
    assert warm.num_guesses < cold.num_guesses
    assert warm.rate > cold.rate


def test_what_one_request_teaches_helps_the_next() -> None:
    policy = _policy(MEASURED)
    for _ in range(3):
        first = serve(policy, [[(False, 0.8)] * 60], cost=MEASURED, max_running=1)
    fresh = serve(_policy(MEASURED), [[(False, 0.8)] * 60], cost=MEASURED, max_running=1)
    assert sum(first.lengths) < sum(fresh.lengths)


def _decided(
    policy: DraftPolicy, ids: list[RequestId], offers: list[Offer], **round_: Any
) -> list[bool]:
    policy.begin_round(ids, **round_)
    return policy.choose(offers)


def _one_level(policy: DraftPolicy, chances: list[float], **round_: Any) -> list[bool]:
    ids = [RequestId(f"{i}") for i in range(len(chances))]
    offers = [Offer(request_id=i, evidence=evidence(p)) for i, p in zip(ids, chances, strict=True)]
    return _decided(policy, ids, offers, **round_)


def _admitted(policy: DraftPolicy, count: int) -> DraftPolicy:
    for number in range(count):
        policy.admit(RequestId(f"{number}"), None, Belief())
    return policy


def test_in_a_larger_batch_where_rows_are_dear_less_is_drafted() -> None:
    dear = CostModel(
        draft_step_s=0.05, verify_s=(1.0,) * 9, verify_rows_s=((10, 1.2), (40, 9.0)), guess_s=0.02
    )
    single = _served(dear, _texts(1, 6), 1)
    crowd = _served(dear, _texts(1, 48), 24)
    assert sum(crowd.lengths) / len(crowd.lengths) < 0.5 * sum(single.lengths) / len(single.lengths)


def test_the_time_of_a_prompt_is_no_reason_to_draft() -> None:
    """Rows are as dear next to the rows of a prompt, and a second is worth as much as without."""
    cost = CostModel(draft_step_s=0.05, verify_s=tuple(1.0 + 0.5 * i for i in range(9)))
    chance, with_prompt = [0.45], {"num_requests": 1, "num_known": 400, "num_prefill": 399}
    drafted = [
        _one_level(_admitted(_policy(cost, seed=seed), 1), chance, **rows)[0]
        for rows in ({}, with_prompt)
        for seed in range(40)
    ]
    assert sum(drafted[40:]) <= sum(drafted[:40]) + 2 < 12
    likely = [
        _one_level(_admitted(_policy(cost), 1), [0.97], **rows)[0] for rows in ({}, with_prompt)
    ]
    assert likely == [True, True]


def test_more_is_drafted_while_another_microbatch_is_verified() -> None:
    """Draft steps that are expensive alone are hidden behind the time of the verifier."""
    slow = CostModel(draft_step_s=0.5, verify_s=tuple(1.0 + 0.01 * i for i in range(9)))
    chances = [0.35]
    unhidden = sum(
        _one_level(_admitted(_policy(slow, seed=seed), 1), chances)[0] for seed in range(60)
    )
    beside = sum(
        _one_level(_admitted(_policy(slow, seed=seed), 1), chances, overlapped=True)[0]
        for seed in range(60)
    )
    assert beside > unhidden + 20


def _siblings(policy: DraftPolicy, top1_prob: float, *, shape: int = 3) -> list[bool]:
    request_id = RequestId("0")
    offers = [
        Offer(request_id=request_id, evidence=evidence(top1_prob), rank=r) for r in range(shape)
    ]
    return _decided(policy, [request_id], offers)


def test_siblings_are_drafted_where_rows_are_free_and_not_where_they_are_dear() -> None:
    free = CostModel(draft_step_s=0.01, verify_s=tuple(1.0 + 0.001 * i for i in range(9)))
    dear = CostModel(draft_step_s=0.01, verify_s=tuple(1.0 + 0.45 * i for i in range(9)))
    assert _siblings(_admitted(_policy(free), 1), 0.6) == [True, True, True]
    assert _siblings(_admitted(_policy(dear), 1), 0.9) == [True, False, False]


def test_siblings_that_were_never_right_are_drafted_no_more() -> None:
    cost = CostModel(draft_step_s=0.02, verify_s=tuple(1.0 + 0.04 * i for i in range(9)))
    policy = _admitted(_policy(cost), 1)
    assert sum(_siblings(policy, 0.6, shape=2)) == 2
    for number in range(200):
        _siblings(policy, 0.6, shape=2)
        chosen = 0 if number % 5 < 3 else -1
        branch = Branch(depth=0, num_offered=2, chosen_rank=chosen, evidence=evidence(0.6))
        policy.observe(
            [
                Outcome(
                    request_id=RequestId("0"),
                    num_drafted=2,
                    num_accepted=int(chosen >= 0),
                    branches=(branch,),
                )
            ]
        )
    assert _siblings(policy, 0.6, shape=2) == [True, False]


def test_a_tree_grows_below_the_nodes_that_were_taken() -> None:
    """The child of an unlikely sibling is less likely than the child of the first choice."""
    cost = CostModel(draft_step_s=0.01, verify_s=tuple(1.0 + 0.035 * i for i in range(12)))
    policy, request_id = _admitted(_policy(cost), 1), RequestId("0")
    assert _siblings(policy, 0.75, shape=2) == [True, True]
    offers = [Offer(request_id=request_id, evidence=evidence(0.75), parent=p) for p in (0, 1)]
    assert policy.choose(offers) == [True, False]


def test_without_learning_nothing_changes_and_the_same_run_drafts_the_same() -> None:
    texts = _texts(1, 6)
    runs = []
    for _ in range(2):
        policy = _policy(MEASURED, learn=False)
        runs.append(serve(policy, texts, cost=MEASURED, max_running=3).lengths)
    assert runs[0] == runs[1]
    assert sum(runs[0]) > 0
    pinned = _admitted(_policy(MEASURED, learn=False), 1)
    pinned.observe([outcome(8, 0)] * 50)
    pinned.advise({RequestId("0"): Belief(alpha=1.0, beta=90.0, num_rounds=50)})
    assert [_one_level(pinned, [0.9]) for _ in range(20)].count([True]) == 20


def test_a_swapped_head_starts_with_a_drift_of_its_own() -> None:
    policy = _admitted(_policy(CHEAP), 1)
    for _ in range(60):
        policy.begin_round([RequestId("0")])
        policy.choose([Offer(request_id=RequestId("0"), evidence=evidence(0.8))])
        policy.observe(
            [
                Outcome(
                    request_id=RequestId("0"),
                    num_drafted=1,
                    num_accepted=0,
                    evidence=(evidence(0.8),),
                )
            ]
        )
    assert [_one_level(policy, [0.8]) for _ in range(10)].count([True]) <= 2
    policy.recalibrate(calibrator())
    assert [_one_level(policy, [0.8]) for _ in range(10)].count([True]) >= 8


def test_lookups_in_vain_do_not_keep_a_request_awake() -> None:
    def num_decisions(*, accepted: int) -> int:
        policy, name = _policy(MEASURED), RequestId("one")
        policy.admit(name, None, Belief())
        count = 0
        for _ in range(100):
            if name in policy.begin_round([name]):
                count += 1
                policy.observe(
                    [Outcome(request_id=name, num_drafted=2, num_accepted=accepted, is_lookup=True)]
                )
        return count

    assert num_decisions(accepted=1) == 100
    assert num_decisions(accepted=0) < 20


def test_requests_that_rest_wake_in_the_same_rounds() -> None:
    policy = _policy(MEASURED)
    names = [RequestId(str(number)) for number in range(8)]
    num_decisions = 0
    for number in range(256):
        if number % 7 == 0 and number // 7 < len(names):  # they arrive one after another
            policy.admit(names[number // 7], None, Belief())
        live = names[: number // 7 + 1]
        active = policy.begin_round(live)
        policy.observe(Outcome(request_id=name, num_drafted=0, num_accepted=0) for name in active)
        num_decisions += bool(active) and number >= 128
    assert num_decisions == 128 // 16


def test_where_drafts_are_in_vain_a_new_request_begins_with_a_rest() -> None:
    def first_round(*, accepted: int) -> int:
        policy, sure = _policy(MEASURED), (evidence(0.9),)
        for number in range(100):
            name = RequestId(str(number))
            policy.admit(name, None, Belief())
            if name in policy.begin_round([name]):
                policy.observe(
                    [Outcome(request_id=name, num_drafted=1, num_accepted=accepted, evidence=sure)]
                )
            policy.end(name)
        policy.admit(RequestId("new"), None, Belief())
        return next(at for at in range(99) if policy.begin_round([RequestId("new")]))

    assert first_round(accepted=1) == 0
    assert 0 < first_round(accepted=0) < 16


def test_guesses_that_looked_good_and_failed_for_long_do_not_end_all_drafting() -> None:
    """The calibration promises 0.9 for a text of which first nothing is accepted."""
    sure, request, num_seeds = evidence(0.9), RequestId("one"), 6

    def rounds(policy: DraftPolicy, count: int, *, accepts: bool) -> int:
        total = 0
        for _ in range(count):
            length = drafted(policy)
            judged = Outcome(
                request_id=request,
                num_drafted=length,
                num_accepted=length if accepts else 0,
                evidence=(sure,) * length,
            )
            policy.observe([judged])
            total += length
        return total

    def drafted(policy: DraftPolicy) -> int:
        policy.begin_round([request])
        length = 0
        while length < 8 and policy.worth_a_guess([request]):
            if not policy.choose([Offer(request_id=request, evidence=sure, parent=length - 1)])[0]:
                break
            length += 1
        return length

    after_change = 0
    for seed in range(num_seeds):
        policy = _cheap_policy(seed)
        policy.admit(request, None, Belief())
        rounds(policy, 600, accepts=False)
        assert rounds(policy, 100, accepts=False) <= 5
        after_change += rounds(policy, 200, accepts=True)
    assert after_change > 200 * num_seeds


def _cheap_policy(seed: int) -> DraftPolicy:
    cheap = CostModel(draft_step_s=0.1, verify_s=(1.0, 1.02), round_s=0.05, guess_s=0.06)
    speculation = SpeculationConfig(controller="goodput", seed=seed)
    return DraftPolicy(speculation=speculation, cost=cheap, calibrator=None)


@pytest.mark.parametrize("cost", [MEASURED, FLAT], ids=["measured", "flat"])
@pytest.mark.parametrize("ease", [3, 1])
@pytest.mark.parametrize("max_running", [2, 8, 32])
def test_by_rules_a_batch_keeps_up_with_the_best_fixed_length(
    cost: CostModel, ease: float, max_running: int
) -> None:
    texts = _texts(ease, max(4 * max_running, 16))
    policy = DraftPolicy(speculation=SpeculationConfig(), cost=cost, calibrator=BY_TRUE_GAP)
    served = serve(policy, texts, cost=cost, max_running=max_running, by_rules=True)
    # Of two requests, each often drafts alone, without knowing what the other's guesses are.
    min_share = 0.95 if max_running == 2 else 0.98
    assert served.rate > min_share * _best_fixed(cost, texts, max_running)


@pytest.mark.parametrize("max_running", [1, 8])
def test_a_head_without_a_calibration_drafts_by_rules_and_gains(max_running: int) -> None:
    texts = _texts(1, 4 * max_running + 12)
    policy = DraftPolicy(speculation=SpeculationConfig(), cost=FLAT, calibrator=UNFITTED)
    served = serve(policy, texts, cost=FLAT, max_running=max_running, by_rules=True)
    assert served.rate > 0.95 * _best_fixed(FLAT, texts, max_running)


def _prices(cost: CostModel) -> tuple[list[float], float]:
    """Returns the prices of each token of the drafts of four requests, and its acceptance."""
    names = [RequestId(str(number)) for number in range(4)]
    policy = DraftPolicy(
        speculation=SpeculationConfig(max_draft_tokens=4), cost=cost, calibrator=BY_GAP
    )
    for name in names:
        policy.admit(name, None, Belief())
    policy.begin_round(names)
    rules = policy.chain_rules(dict.fromkeys(names, 0.0))
    assert {rule.guess_price for rule in rules.values()} == {0.0}
    return np.diff(rules[names[0]].prices).tolist(), rules[names[0]].mean


def _flat(draft_step_s: float) -> CostModel:
    return CostModel(
        draft_step_s=draft_step_s,
        verify_s=(10.0,) * 9,
        draft_rows_s=((4, draft_step_s),),
        verify_rows_s=((99, 10.0),),
    )


def test_a_level_that_is_there_anyway_costs_as_much_as_one_more_token_in_it() -> None:
    prices, theta = _prices(_flat(1.0))
    assert prices[0] == pytest.approx(0.0)
    # The whole level, where none of the others gets as far.
    p_only = [(1.0 - theta**level) ** 3 for level in range(1, 4)]
    assert [price / prices[1] for price in prices[1:]] == pytest.approx(
        [share / p_only[0] for share in p_only]
    )


def test_a_level_beyond_the_common_length_is_paid_by_those_that_are_expected_to_go_on() -> None:
    prices, theta = _prices(_flat(6.0))
    assert prices[0] == pytest.approx(0.0)  # one token pays for all of them together
    going_on = [max(round(4 * theta**level), 1) / 2 for level in range(1, 4)]
    shares = [1.0 / max(count, 1.0) for count in going_on]
    assert [price / prices[1] for price in prices[1:]] == pytest.approx(
        [share / shares[0] for share in shares]
    )


def test_what_draws_have_cost_is_paid_once() -> None:
    policy = DraftPolicy(
        speculation=SpeculationConfig(max_draft_tokens=4), cost=CHEAP, calibrator=BY_GAP
    )
    names = [RequestId(str(number)) for number in range(3)]
    for name in names:
        policy.admit(name, None, Belief())
    for _ in range(400):  # until the budget is full
        policy.begin_round(names)
    rules = policy.chain_rules(dict.fromkeys(names, 0.0))
    budget = sum(rule.optimism for rule in rules.values())
    assert budget > 0.0
    spent = ChainReport((), 0, 0, 0.0, budget / 3, probed=False)
    policy.report({names[0]: spent, names[1]: spent})
    after = policy.chain_rules(dict.fromkeys(names, 0.0))
    assert sum(rule.optimism for rule in after.values()) == pytest.approx(budget / 3)


@pytest.mark.usefixtures("documented_controller")
def test_a_policy_has_rules_of_the_controllers_that_decide_in_advance() -> None:
    policy = DraftPolicy(
        speculation=SpeculationConfig(fixed_length=2), cost=CHEAP, calibrator=calibrator()
    )
    fixed, by_evidence = RequestId("fixed"), RequestId("by evidence")
    policy.admit(fixed, "fixed", Belief())
    policy.admit(by_evidence, "threshold", Belief())
    policy.begin_round([fixed, by_evidence])
    rules = policy.chain_rules({fixed: 0.0, by_evidence: 0.0})
    assert set(rules) == {fixed}
    assert follow(rules[fixed], [9.0] * 4).num_drafted == 2
    assert policy.worth_a_guess([by_evidence]) == {by_evidence}


def test_many_rejections_at_once_move_the_forecast_as_far_by_rules_as_by_evidence() -> None:
    names = [RequestId(str(number)) for number in range(16)]
    means: list[float] = []
    for by_rules in (True, False):
        policy = DraftPolicy(
            speculation=SpeculationConfig(max_draft_tokens=1, seed=3), cost=CHEAP, calibrator=BY_GAP
        )
        for name in names:
            policy.admit(name, None, Belief())
        policy.begin_round(names)
        seen = Evidence(depth=0, temperature=0.0, gap=5.0)
        if by_rules:
            rules = policy.chain_rules(dict.fromkeys(names, 0.0))
            policy.report({name: follow(rule, [seen.gap]) for name, rule in rules.items()})
        policy.observe(replace(outcome(1, 0, [seen]), request_id=name) for name in names)
        policy.begin_round(names)
        after = policy.chain_rules(dict.fromkeys(names, 0.0))
        means.append(acceptance(after[names[0]], 0, seen.gap)[1])
    assert means[0] == pytest.approx(means[1], abs=1e-9)
    assert means[0] < 0.8
