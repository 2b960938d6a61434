"""The fuzz finds errors that are planted in the verify stage; `make test-planted-errors`."""

import time
from itertools import count

import pytest

from eesd_dist.bench.fuzz import play
from eesd_dist.bench.fuzz.cases import Case
from eesd_dist.bench.fuzz.check import check
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.reference import PlainTexts
from tests.support.fuzz_plants import MIN_VERIFY_RANKS, PLANTS, planted, with_a_spare_page
from tests.support.fuzz_reduction import reduced
from tests.unit.bench.fuzz.conftest import MakeSource

_WITHIN_S = 120.0


@pytest.mark.parametrize(
    "plant", [p if p == "page" else pytest.param(p, marks=pytest.mark.slow) for p in PLANTS]
)
def test_a_planted_error_is_found_and_seen_again(
    plant: str, make_source: MakeSource, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = play.Pipeline
    plain = PlainTexts(shelf)
    monkeypatch.setattr(play, "Pipeline", planted(plant))
    case = first_failing(plant, 2, make_source, shelf, plain)
    first, second = (check(case, shelf, plain) for _ in range(2))
    assert first.failures[0] == second.failures[0]
    assert first.num_tokens > 0, "an engine that could not be built fails as well"
    monkeypatch.setattr(play, "Pipeline", sound)
    assert check(case, shelf, plain).failures == ()


def test_a_failure_is_made_smaller(
    make_source: MakeSource, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PlainTexts(shelf)
    monkeypatch.setattr(play, "Pipeline", planted("key"))
    case = first_failing("key", 4, make_source, shelf, plain)
    smaller = reduced(case, check(case, shelf, plain), shelf, plain, limit_s=60.0)
    assert len(smaller.entries) == 1
    assert check(smaller, shelf, plain).failures[0].entry == smaller.entries[0].name


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_error_is_found_for_ten_of_ten_seeds(
    plant: str, make_source: MakeSource, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(1, 11):
        monkeypatch.setattr(play, "Pipeline", planted(plant, seed=seed))
        first_failing(plant, seed, make_source, shelf, PlainTexts(shelf))


def first_failing(
    plant: str, seed: int, make_source: MakeSource, shelf: ModelShelf, plain: PlainTexts
) -> Case:
    """Returns the first case that fails, which has to be found in time."""
    source = make_source(
        seed,
        num_models=8,
        dtypes=("float32", "float16", "bfloat16"),
        min_verify_ranks=MIN_VERIFY_RANKS.get(plant, 1),
    )
    began_s = time.monotonic()
    for number in count():
        case = with_a_spare_page(source.case(number))
        if check(case, shelf, plain).failures:
            return case
        assert time.monotonic() - began_s < _WITHIN_S, seed
    raise AssertionError("unreachable")
