"""A failing case is reduced step by step, and every step was seen to fail."""

from eesd_dist.bench.fuzz.cases import Case
from tests.support.fuzz_reduction import reduce_case
from tests.unit.bench.fuzz.conftest import MakeSource


def _large(make_source: MakeSource) -> Case:
    source = make_source(5, num_models=3)
    cases = (source.case(number) for number in range(200))
    return next(
        case
        for case in cases
        if len(case.engines) == 1
        and len(case.entries) > 9
        and len(case.troubles) > 3
        and case.engines[0].speculation.tree.shape == "dynamic"
        and any(
            entry.name == "r3" and entry.request.sampling.max_tokens >= 5 for entry in case.entries
        )
        and any(trouble.kind == "loss" for trouble in case.troubles)
    )


def test_only_what_the_failure_needs_is_left(make_source: MakeSource) -> None:
    tried: list[Case] = []

    def fails(case: Case) -> bool:
        """Acts as if a tree of one request broke its fifth token when a stage is lost."""
        tried.append(case)
        culprits = [entry for entry in case.entries if entry.name == "r3"]
        return (
            bool(culprits)
            and culprits[0].request.sampling.max_tokens >= 5
            and case.engines[0].speculation.tree.shape != "none"
            and any(trouble.kind == "loss" for trouble in case.troubles)
        )

    case = _large(make_source)
    small = reduce_case(case, fails, culprit="r3", limit_s=60.0)
    (entry,) = small.entries
    assert entry.name == "r3"
    assert entry.request.sampling.max_tokens == 5
    assert len(entry.request.prompt) == 1
    assert [trouble.kind for trouble in small.troubles] == ["loss"]
    assert small.engines[0].speculation.tree.shape == "dynamic"
    assert small.engines[0].scheduler.overlap is False
    assert (small.world.draft_ranks, small.world.verify_ranks) == (1, 1)
    assert len(tried) < 400


def test_it_ends_when_its_time_is_up(make_source: MakeSource) -> None:
    times = iter([0.0, *(float(second) for second in range(100))])
    case = _large(make_source)
    tried: list[Case] = []

    def fails(case: Case) -> bool:
        tried.append(case)
        return True

    reduce_case(case, fails, culprit=None, limit_s=5.0, clock=lambda: next(times))
    assert len(tried) == 6
