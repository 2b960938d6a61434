"""The pipeline directory: heartbeats, load, and the choice of a pipeline."""

import dataclasses
import json
from collections import Counter
from random import Random

import pytest

from eesd_dist.errors import CapacityError
from eesd_dist.routing import PipelineDirectory, PipelineId, PipelineReport, Promotion
from eesd_dist.routing.directory import RankLoad, StartReport


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def directory(clock: Clock) -> PipelineDirectory:
    return PipelineDirectory(clock=clock, rng=Random(3), expiry_s=5.0)


def report(
    name: str, *, running: int = 0, waiting: int = 0, draining: bool = False
) -> PipelineReport:
    return PipelineReport(
        pipeline_id=PipelineId(name),
        leader=f"leader of {name}",
        address=object(),
        ranks={"drafting actor": object()},
        num_running=running,
        num_waiting=waiting,
        draining=draining,
    )


def test_the_least_busy_takes_the_request() -> None:
    book = directory(Clock())
    book.heartbeat(report("a", running=3, waiting=2))
    book.heartbeat(report("b", running=4))
    assert book.choose().leader == "leader of b"


def test_a_burst_between_heartbeats_is_spread() -> None:
    book = directory(Clock())
    for name in "abcd":
        book.heartbeat(report(name))
    counts = Counter(book.choose().pipeline_id for _ in range(400))
    assert all(abs(count - 100) <= 10 for count in counts.values())


def test_a_heartbeat_replaces_what_was_only_guessed() -> None:
    book = directory(Clock())
    book.heartbeat(report("a"))
    book.heartbeat(report("b", running=1))
    for _ in range(6):
        book.choose()
    book.heartbeat(report("a"))
    assert book.choose().pipeline_id == "a"


def test_the_silent_are_forgotten_and_named() -> None:
    clock = Clock()
    book = directory(clock)
    book.heartbeat(report("a"))
    clock.now_s += 4
    book.heartbeat(report("b"))
    clock.now_s += 2
    assert book.expire() == ("a",)
    assert [record.report.pipeline_id for record in book.records()] == ["b"]


def test_a_draining_pipeline_takes_nothing_new() -> None:
    book = directory(Clock())
    book.heartbeat(report("a", draining=True))
    book.heartbeat(report("b", running=50))
    assert {book.choose().pipeline_id for _ in range(20)} == {"b"}


def test_one_that_just_failed_can_be_left_out() -> None:
    book = directory(Clock())
    book.heartbeat(report("a"))
    book.heartbeat(report("b", running=50))
    assert book.choose(excluded=[PipelineId("a")]).pipeline_id == "b"


def test_without_pipelines_it_says_so() -> None:
    book = directory(Clock())
    book.heartbeat(report("a"))
    book.leave(PipelineId("a"))
    book.leave(PipelineId("never there"))
    with pytest.raises(CapacityError, match="no pipeline"):
        book.choose()


def test_what_an_operator_sees_is_plain_json() -> None:
    clock = Clock()
    book = directory(clock)
    start = StartReport(
        num_workers=1, num_slots=2, loads=(RankLoad(rank="r", bytes_done=1, bytes_total=2),)
    )
    book.heartbeat(dataclasses.replace(report("a", running=2), start=start))
    book.choose()
    clock.now_s += 1
    (described,) = json.loads(json.dumps(book.describe()))
    assert described["load"] == 3
    assert described["silent_s"] == 1.0
    assert described["start"]["loads"] == [{"rank": "r", "bytes_done": 1, "bytes_total": 2}]
    assert described["leader"] == "leader of a"
    assert not {"address", "ranks"} & described.keys(), "handles are no JSON"


def test_the_latest_promotion_outlives_its_reporter_and_is_for_its_configuration_alone() -> None:
    clock = Clock()
    book = directory(clock)
    old = Promotion(in_place_of="app:model:", head="/old", taken_unix_s=1.0)
    new = Promotion(in_place_of="app:model:", head="/new", taken_unix_s=2.0)
    for name, promotion in (("a", new), ("b", old), ("c", None)):
        book.heartbeat(dataclasses.replace(report(name), promotion=promotion))
    clock.now_s += 60.0
    assert book.records() == ()
    assert book.promotion("app:model:") == new
    assert book.promotion("app:model:/other/head") is None
    assert json.dumps(book.describe()) == "[]"


def test_callers_hear_at_once_of_another_process_and_of_what_it_takes_and_of_no_more() -> None:
    clock = Clock()
    book = directory(clock)
    first = report("a")
    assert book.heartbeat(first), "a pipeline that was not known"
    assert not book.heartbeat(first)
    assert not book.heartbeat(dataclasses.replace(first, num_running=7, weight=2.0, start_s=9.0))
    changes: list[dict[str, object]] = [
        {"leader": "another process"},
        {"epoch": 2},
        {"is_ready": False},
        {"draining": True},
    ]
    for change in changes:
        changed = dataclasses.replace(first, **change)  # type: ignore[arg-type]
        assert book.heartbeat(changed), change
        assert not book.heartbeat(changed)
        assert book.heartbeat(first)
    book.leave(first.pipeline_id)
    assert book.heartbeat(first)
    clock.now_s += 6.0
    assert book.listed() == ()
    assert book.heartbeat(first), "it had expired"
