"""What an engine did in the last seconds, and its measured capacity."""

import pytest

from eesd_dist.control.cost import CostModel
from eesd_dist.routing.activity import Activity, RecentRounds, max_tokens_per_s
from eesd_dist.routing.ingress_reports import IngressReport, IngressReports
from eesd_dist.types import RoundStats


def round_of(at_s: float, *, requests: int, emitted: int, drafted: int, prefill: int = 0):  # type: ignore[no-untyped-def]
    return RoundStats(
        round_id=1,
        microbatch=0,
        num_requests=requests,
        num_rows=requests,
        num_prefill_rows=prefill,
        num_drafted=drafted,
        num_accepted=0,
        num_emitted=emitted,
        plan_s=0.0,
        draft_s=0.0,
        transfer_s=0.0,
        verify_s=0.0,
        commit_s=0.0,
        started_unix_s=at_s,
        elapsed_s=0.0,
    )


def recent(*rounds: RoundStats) -> RecentRounds:
    rounds_ = RecentRounds()
    for stats in rounds:
        rounds_.add(stats)
    return rounds_


def test_only_rounds_of_the_last_ten_seconds_count() -> None:
    rounds = recent(
        round_of(89.0, requests=9, emitted=90, drafted=9),
        round_of(95.0, requests=4, emitted=4, drafted=0, prefill=100),
        round_of(99.0, requests=2, emitted=6, drafted=8),
    )
    activity = rounds.activity(
        time_unix_s=100.0, num_waiting=3, kv_use=0.25, first_tokens_s=[0.1] * 9 + [5.0]
    )
    assert activity == Activity(
        num_waiting=3,
        kv_use=0.25,
        tokens_per_s=10 / 9,
        tokens_per_turn=3.0,
        draft_length=4.0,
        first_token_s=0.1,
    )


def test_an_idle_engine_has_no_first_token_and_gains_one_token_a_round() -> None:
    activity = recent().activity(time_unix_s=1.0, num_waiting=0, kv_use=0.0, first_tokens_s=[])
    assert (activity.tokens_per_s, activity.tokens_per_turn) == (0.0, 1.0)
    assert activity.first_token_s is None


def test_rounds_of_a_fast_engine_count_however_many_they_are() -> None:
    rounds = recent(
        *(round_of(90.0 + at / 500, requests=1, emitted=1, drafted=0) for at in range(5000))
    )
    for time_unix_s in (99.999, 100.5):
        activity = rounds.activity(
            time_unix_s=time_unix_s, num_waiting=0, kv_use=0.0, first_tokens_s=[]
        )
        seconds = time_unix_s - (90.0 if time_unix_s < 100.0 else 91.0)
        emitted = 5000 if time_unix_s < 100.0 else 4500
        assert activity.tokens_per_s == pytest.approx(emitted / seconds)


def test_part_of_a_drafted_token_costs_its_part() -> None:
    cost = CostModel(draft_step_s=0.01, verify_s=(0.1, 0.11))
    activity = Activity(tokens_per_turn=1.2, draft_length=0.4)
    round_s = cost.batch_seconds([1, 1, 0, 0, 0])
    assert max_tokens_per_s(cost, activity, num_live=5) == pytest.approx(5 * 1.2 / round_s)


def test_the_capacity_is_that_of_a_round_at_the_target_of_live_requests() -> None:
    cost = CostModel(
        draft_step_s=0.01, verify_s=(0.1,), verify_rows_s=((20, 0.2),), draft_rows_s=((4, 0.02),)
    )
    activity = Activity(tokens_per_turn=3.0, draft_length=4.0)
    round_s = cost.batch_seconds([4] * 4)
    assert max_tokens_per_s(cost, activity, num_live=4) == pytest.approx(4 * 3.0 / round_s)
    assert max_tokens_per_s(None, activity, num_live=4) is None


def test_the_queue_of_a_silent_ingress_does_not_count() -> None:
    reports = IngressReports(expiry_s=5.0)

    def note(app: str, ingress: str, num_waiting: int, received_s: float) -> None:
        report = IngressReport(num_waiting=num_waiting, targets=None, received_s=received_s)
        reports.note(app, ingress, report)

    note("eesd", "one", 3, 0.0)
    note("eesd", "two", 4, 2.0)
    note("other", "one", 9, 2.0)
    assert reports.num_waiting("eesd", time_s=3.0) == 7
    note("eesd", "two", 1, 6.0)
    assert reports.num_waiting("eesd", time_s=6.0) == 1
    latest = reports.latest("eesd", time_s=6.0)
    assert latest is not None
    assert latest.received_s == 6.0
    assert reports.latest("eesd", time_s=12.0) is None


def test_metrics_are_shown_of_ingresses_that_report() -> None:
    reports = IngressReports(expiry_s=5.0)
    for ingress, received_s in (("one", 0.0), ("two", 4.0)):
        reports.note(
            "eesd", ingress, IngressReport(num_waiting=0, targets=None, received_s=received_s)
        )
        reports.note_page("eesd", ingress, ingress.encode())
    reports.note_page("other", "one", b"x")
    assert reports.pages("eesd", time_s=4.0) == {"one": b"one", "two": b"two"}
    reports.note_page("eesd", "two", b"later")
    assert reports.pages("eesd", time_s=6.0) == {"two": b"later"}
