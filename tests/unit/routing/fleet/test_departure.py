"""Fewer pipelines: the emptiest is drained before the number is lowered."""

from dataclasses import replace
from typing import Any

from eesd_dist.routing.directory import PipelineId, PipelineReport
from eesd_dist.routing.fleet.departure import Fleet
from eesd_dist.routing.fleet.size import FleetTargets

TARGETS = FleetTargets(
    min_count=0,
    max_count=4,
    live_requests=10.0,
    up_delay_s=0.0,
    down_delay_s=10.0,
    idle_delay_s=10.0,
)


def report(name: str, num_running: int = 0, **how: Any) -> PipelineReport:
    return PipelineReport(
        pipeline_id=PipelineId(name), leader=name, address=None, num_running=num_running, **how
    )


class Service:
    """A fleet, and a Serve that has the number it was given last."""

    def __init__(self, *reports: PipelineReport, count: int | None = None) -> None:
        self.reports = list(reports)
        self.count = len(reports) if count is None else count
        self.now_s = 0.0
        self.targets = TARGETS
        self.fleet = Fleet(TARGETS, count=self.count, time_s=0.0, drain_limit_s=30.0)

    def look(self, *, times: int = 1, num_waiting: int = 0) -> int:
        for _ in range(times):
            self.now_s += 1.0
            self.count = self.fleet.look(
                self.reports,
                targets=self.targets,
                num_waiting=num_waiting,
                count=self.count,
                time_s=self.now_s,
            )
        return self.count


def test_the_emptiest_is_drained_and_the_number_falls_once_it_is_empty() -> None:
    service = Service(report("a", 3), report("b", 1))
    assert service.look(times=11) == 2
    assert service.fleet.state.decision.target == 1
    assert service.fleet.leaving == "b"
    service.reports = [report("a", 4), report("b", 0, is_ready=True)]  # it has not heard yet
    assert service.look() == 2
    service.reports = [report("a", 4), report("b", 0, draining=True)]
    assert service.look() == 1


def test_a_pipeline_that_was_drained_for_nothing_takes_requests_again() -> None:
    service = Service(report("a", 3), report("b", 1))
    service.look(times=11)
    service.reports = [report("a", 4), report("b", 0, draining=True)]
    assert service.look() == 1
    service.reports[0] = replace(service.reports[0], draining=True, is_stopping=True)
    assert service.look() == 1
    assert service.fleet.leaving is None


def test_streams_that_do_not_leave_hold_the_number_up_for_a_limited_time() -> None:
    service = Service(report("a", 3), report("b", 1))
    service.look(times=11)
    service.reports = [report("a", 3), report("b", 1, draining=True)]
    assert service.look(times=25) == 2
    assert service.look(times=10) == 1


def test_a_load_that_rises_again_ends_the_draining() -> None:
    service = Service(report("a", 3), report("b", 1))
    service.look(times=11)
    assert service.fleet.leaving == "b"
    service.reports = [report("a", 15), report("b", 1, draining=True)]
    assert service.look(times=2) == 2
    assert service.fleet.state.decision.target == 2
    assert service.fleet.leaving is None


def test_no_pipeline_is_drained_while_one_that_starts_can_be_given_up() -> None:
    service = Service(report("a", 3), report("b", 0, is_ready=False, is_starting=True))
    assert service.look(times=11) == 1
    assert service.fleet.leaving is None


def test_a_pipeline_that_has_not_reported_yet_is_given_up_first() -> None:
    service = Service(report("a", 3), report("b", 2), count=3)
    assert service.look(times=11) == 2
    assert service.fleet.leaving is None


def test_the_last_pipeline_is_not_drained_since_no_other_could_take_its_streams() -> None:
    service = Service(report("a", 0))
    assert service.look(times=12) == 0
    assert service.fleet.leaving is None
    assert service.look(num_waiting=1) == 1


def test_the_state_counts_the_decisions_by_direction_and_signal() -> None:
    service = Service(count=0)
    service.look(num_waiting=1)
    service.reports = [report("a", 1)]
    service.look(num_waiting=1)
    state = service.fleet.state
    assert state.num_changes == {("up", "queue"): 1}
    assert (state.count, state.num_ready, state.num_starting, state.num_waiting) == (1, 1, 0, 1)


def test_the_next_pipeline_is_drained_when_the_last_one_has_stopped() -> None:
    service = Service(report("a", 9), report("b", 9), report("c", 9), report("d", 1))
    service.look()
    service.targets = replace(TARGETS, max_count=1)
    assert service.look(times=2) == 4
    assert service.fleet.leaving == "d"
    service.reports[3] = report("d", 0, draining=True)
    assert service.look(times=5) == 3
    assert service.fleet.leaving == "d", "Serve has not chosen yet"
    service.reports[3] = report("d", 0, draining=True, is_stopping=True)
    assert service.look(times=5) == 3
    assert service.fleet.leaving is None
    service.reports = [report("a", 9), report("b", 9), report("c", 10)]
    assert service.look(times=5) == 3
    assert service.fleet.leaving == "a"


def test_the_drained_pipeline_may_have_gone_before_serve_is_seen_to_stop_it() -> None:
    service = Service(report("a", 3), report("b", 3), report("c", 1))
    service.look()
    service.targets = replace(TARGETS, max_count=1)
    service.look()
    assert service.fleet.leaving == "c"
    service.reports = [report("a", 3), report("b", 4)]
    assert service.look() == 2, "what has left is given up"
    assert service.look() == 2
    assert service.fleet.leaving == "a"


def test_nothing_is_given_up_while_a_pipeline_recovers_or_is_drained_by_hand() -> None:
    for unable in ({"is_ready": False}, {"draining": True}):
        service = Service(report("a", 0, **unable), report("b", 3))
        assert service.look(times=40) == 2
        assert service.fleet.state.decision.target == 1
        assert service.fleet.leaving is None
        service.reports[0] = report("a", 0)
        service.look()
        assert service.fleet.leaving == "a"


def test_a_load_that_rises_while_serve_chooses_is_followed_at_once() -> None:
    service = Service(report("a", 3), report("b", 1))
    service.look(times=11)
    service.reports = [report("a", 4), report("b", 0, draining=True)]
    assert service.look() == 1
    service.count = 2  # Serve has not heard yet
    service.reports = [report("a", 15), report("b", 0, draining=True)]
    assert service.look(times=2) == 2
    assert service.fleet.leaving is None


def test_a_number_that_serve_does_not_follow_is_repeated() -> None:
    service = Service(report("a", 3), report("b", 1))
    service.look(times=11)
    service.reports = [report("a", 4), report("b", 0, draining=True)]
    assert service.look() == 1
    service.count = 2
    assert service.look() == 1
