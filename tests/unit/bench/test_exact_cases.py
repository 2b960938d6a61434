"""The topologies that `eesd bench exact` compares."""

import pytest

from eesd_dist.bench.exact import ACROSS, HERE, Case, cases_of
from eesd_dist.bench.options import Topology


@pytest.mark.parametrize(
    ("text", "verify_ranks", "draft_ranks"), [("1", 1, 1), ("4", 4, 1), ("2x2", 2, 2)]
)
def test_a_topology_is_written_as_verify_ranks_by_draft_ranks(
    text: str, verify_ranks: int, draft_ranks: int
) -> None:
    assert Topology.parse(text) == Topology(verify_ranks=verify_ranks, draft_ranks=draft_ranks)


@pytest.mark.parametrize("text", ["", "0", "2x", "x2", "2x0", "two", "2x2x2"])
def test_what_is_no_topology_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="like 4 or 2x2"):
        Topology.parse(text)


def test_on_a_cluster_every_topology_runs_in_both_types_and_nothing_runs_here() -> None:
    cases = cases_of(ACROSS, in_process=False)
    assert {(case.verify_ranks, case.dtype) for case in cases} == {
        (ranks, dtype) for ranks in (1, 2, 4) for dtype in ("float32", "bfloat16")
    }
    assert all(case.is_promised for case in cases)


def test_on_this_machine_one_process_is_compared_too_and_fast_numerics_promise_nothing() -> None:
    cases = cases_of(HERE, in_process=True)
    assert {case.verify_ranks for case in cases} == {0, 1, 2}
    fast = Case(verify_ranks=0, dtype="bfloat16", numerics="fast")
    assert [case for case in cases if not case.is_promised] == [fast]
