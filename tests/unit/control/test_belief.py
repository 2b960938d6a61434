"""What a round changes in a belief."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.control.belief import Belief
from eesd_dist.errors import ConfigError
from tests.unit.control.worlds import outcome

rounds = st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


@given(rounds)
def test_a_round_teaches_its_accepted_tokens_and_at_most_one_rejection(
    counts: tuple[int, int],
) -> None:
    drafted, accepted = counts
    belief = Belief().after(outcome(drafted, accepted))
    assert belief.alpha == 1 + accepted
    assert belief.beta == 1 + (accepted < drafted)


def test_tokens_after_the_first_rejection_teach_nothing() -> None:
    assert Belief().after(outcome(2, 1)) == Belief().after(outcome(8, 1))


def test_censored_counting_finds_the_true_rate_where_naive_counting_would_not() -> None:
    """At theta 0.8 and 8 drafted tokens, counting k - r failures would say 0.42."""
    from random import Random

    rng, belief, drafted, accepted = Random(3), Belief(), 0, 0
    for _ in range(4_000):
        survived = next((i for i in range(8) if rng.random() >= 0.8), 8)
        belief = belief.after(outcome(8, survived))
        drafted, accepted = drafted + 8, accepted + survived
    assert belief.mean == pytest.approx(0.8, abs=0.01)
    assert accepted / drafted < 0.5


def test_old_rounds_are_forgotten_and_the_prior_is_not() -> None:
    belief = Belief()
    for _ in range(50):
        belief = belief.after(outcome(4, 4))
    for _ in range(500):
        belief = belief.after(outcome(0, 0), discount=0.9)
    assert belief.alpha == pytest.approx(1.0)
    assert belief.beta == pytest.approx(1.0)


@given(st.lists(rounds, max_size=12), st.floats(1.0, 40.0))
def test_a_bounded_belief_keeps_its_opinion(counts: list[tuple[int, int]], limit: float) -> None:
    belief = Belief()
    for drafted, accepted in counts:
        belief = belief.after(outcome(drafted, accepted))
    bounded = belief.bounded(limit)
    assert bounded.weight <= limit + 1e-9
    if belief.weight > 0:
        share = (belief.alpha - 1) / belief.weight
        assert (bounded.alpha - 1) / bounded.weight == pytest.approx(share)


def test_merging_adds_the_counts_and_not_the_priors() -> None:
    first, second = Belief().after(outcome(4, 2)), Belief().after(outcome(3, 3))
    both = Belief().after(outcome(4, 2)).after(outcome(3, 3))
    assert first.merged(second) == both


@given(st.lists(rounds, max_size=5))
def test_a_belief_survives_json(counts: list[tuple[int, int]]) -> None:
    belief = Belief()
    for drafted, accepted in counts:
        belief = belief.after(outcome(drafted, accepted), discount=0.98)
    assert Belief.from_json(json.loads(json.dumps(belief.to_json()))) == belief


@pytest.mark.parametrize(
    "broken", [{}, {"alpha": "many"}, {"alpha": float("nan")}, {"alpha": -1.0}, {"alpha": 0.0}]
)
def test_a_broken_belief_is_refused(broken: dict[str, object]) -> None:
    data: dict[str, object] = dict(Belief().to_json())
    with pytest.raises(ConfigError, match="belief"):
        Belief.from_json((data | broken) if broken else {})
