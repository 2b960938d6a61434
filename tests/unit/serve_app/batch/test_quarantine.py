import pytest

from eesd_dist.errors import EngineError
from serve_app.batch.quarantine import (
    MAX_BARREN_DEATHS,
    MAX_DEATHS_ALONE,
    Quarantine,
    Suspicion,
)


def test_a_row_is_isolated_step_by_step_until_it_is_to_blame() -> None:
    quarantine = Quarantine()
    (suspicion,) = quarantine.suspicions(["bad"])
    assert not suspicion.num_deaths
    quarantine.begin("engine", ["good", "bad"])
    assert quarantine.died("engine") == 2
    good, bad = quarantine.suspicions(["good", "bad"])
    assert good == bad == Suspicion(num_deaths=1)
    assert not bad.runs_alone
    quarantine.begin("engine", ["good", "bad"])
    quarantine.died("engine")
    assert all(suspicion.runs_alone for suspicion in quarantine.suspicions(["good", "bad"]))
    quarantine.begin("engine", ["good"])
    quarantine.end("engine", ["good"])
    assert quarantine.suspicions(["good"]) == [Suspicion()]
    for number in range(1, MAX_DEATHS_ALONE + 1):
        assert not quarantine.suspicions(["bad"])[0].is_poison
        quarantine.begin("engine", ["bad"])
        quarantine.died("engine")
        assert quarantine.suspicions(["bad"])[0].num_single_deaths == number
    assert quarantine.suspicions(["bad"])[0].is_poison


def test_a_death_counts_against_no_row_of_another_engine() -> None:
    quarantine = Quarantine()
    quarantine.begin("one", ["a"])
    quarantine.begin("two", ["b"])
    assert quarantine.died("two") == 1
    assert [s.num_deaths for s in quarantine.suspicions(["a", "b"])] == [0, 1]
    assert quarantine.died("two") == 0  # a process that died before it had a row


def test_equal_rows_of_two_batches_leave_one_by_one() -> None:
    quarantine = Quarantine()
    quarantine.begin("engine", ["a"])
    quarantine.begin("engine", ["a"])
    quarantine.end("engine", ["a"])
    assert quarantine.died("engine") == 1


def test_engines_that_die_and_answer_nothing_end_the_job() -> None:
    quarantine = Quarantine()
    for _ in range(1 + MAX_BARREN_DEATHS):
        quarantine.restarted("engine")
    with pytest.raises(EngineError, match="an engine has died 9 times in a row"):
        quarantine.restarted("engine")
    quarantine.begin("other", ["a"])
    quarantine.end("other", ["a"])
    assert quarantine.restarted("engine") == 0
