"""Per-request acceptance statistics in the format of vLLM."""

from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.telemetry.spec_stats import SpecStats
from eesd_dist.types import Emission, RequestId, TokenId


def emission(drafted: int, accepted: int) -> Emission:
    return Emission(
        request_id=RequestId("a"),
        tokens=tuple(TokenId(i) for i in range(accepted + 1)),
        num_accepted=accepted,
        num_drafted=drafted,
    )


def test_the_object_is_the_one_vllm_documents() -> None:
    """The example of vLLM's documentation: 43 steps of 3 drafted tokens, histogram 39, 1, 0, 3."""
    stats = SpecStats(num_spec_tokens=3)
    for accepted, count in ((0, 39), (1, 1), (3, 3)):
        for _ in range(count):
            stats.observe(emission(3, accepted))
    assert stats.summary() == {
        "mean_acceptance_length": 1.2325581395348837,
        "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3],
        "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }


def test_rounds_without_a_draft_are_no_steps() -> None:
    stats = SpecStats(num_spec_tokens=4)
    stats.observe(emission(0, 0))
    summary = stats.summary()
    assert summary["num_spec_steps"] == 0
    assert summary["acceptance_histogram"] == [0] * 5
    assert summary["mean_acceptance_length"] == 1.0


rounds = st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


@given(st.lists(rounds, max_size=30))
def test_the_histograms_and_the_totals_agree(counts: list[tuple[int, int]]) -> None:
    stats = SpecStats(num_spec_tokens=8)
    for drafted, accepted in counts:
        stats.observe(emission(drafted, accepted))
    summary = stats.summary()
    steps = [(k, r) for k, r in counts if k > 0]
    assert summary["num_spec_steps"] == len(steps) == sum(summary["acceptance_histogram"])
    assert summary["num_draft_tokens"] == sum(k for k, _ in steps)
    assert summary["num_accepted_draft_tokens"] == sum(r for _, r in steps)
    rows = summary["acceptance_histogram_by_draft_length"]
    assert sum(map(sum, rows.values())) == len(steps)
    assert all(len(row) == int(length) + 1 for length, row in rows.items())
