"""The time of a round is split without a rest."""

from dataclasses import asdict

import msgspec
import pytest

from eesd_dist.bench.round_breakdown import STAGES, ms_per_round, round_s, split_of, without_prefill
from eesd_dist.types import RoundStats, Traffic
from tests.unit.telemetry.rounds import a_round

STATS = a_round(
    plan_s=0.001,
    draft_s=0.012,
    transfer_s=0.003,
    verify_s=0.020,
    waited_s=0.015,
    commit_s=0.004,
    other_s=0.005,
    idle_s=1.0,
    verify_group=Traffic(wait_s=0.005),
    draft_group=Traffic(wait_s=0.004),
)


def test_the_parts_of_a_round_add_up_to_its_wall_clock() -> None:
    split = split_of(STATS)
    assert sum(split[stage] for stage in STAGES) == pytest.approx(round_s(STATS))
    assert round_s(STATS) == pytest.approx(0.037)
    assert split["draft"] == pytest.approx(0.008)
    assert split["transfer"] == pytest.approx(0.003)
    assert split["collectives"] == pytest.approx(0.012 * 0.25 + 0.004)
    assert split["verify"] == pytest.approx(0.012 * 0.75)
    assert split["hidden"] == pytest.approx(0.008)


def test_a_round_is_reported_by_the_median_of_each_stage() -> None:
    slow = a_round(plan_s=9.0, commit_s=9.0)
    row = ms_per_round([STATS, slow, STATS])
    assert row["plan"] == pytest.approx(1.0)
    assert row["overhead"] == pytest.approx(37.0 - 8.0 - 9.0)
    assert ms_per_round([]) == {}


def test_rounds_with_prefill_are_left_out() -> None:
    prefill = a_round(num_prefill_rows=9)
    assert without_prefill([prefill, STATS, prefill]) == [STATS]


def test_the_rounds_of_a_service_are_read_back() -> None:
    row = msgspec.to_builtins(asdict(STATS))
    assert msgspec.convert([row | {"new": 1}], list[RoundStats]) == [STATS]
