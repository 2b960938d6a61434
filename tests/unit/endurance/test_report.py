"""Readings of a service that lives only here: what grows in it is found, and named."""

import json
from collections.abc import Callable, Mapping
from random import Random

from tests.endurance.load import Answers
from tests.endurance.processes import OTHER, Holdings, Pid
from tests.endurance.report import (
    Figure,
    IdleReading,
    Outcome,
    Reading,
    complaints,
    figures_of,
    growth_in_ray,
    table,
)

_MIB = 2**20
_BEGAN_UNIX_S = 1_000_000.0
_INGRESS, _RANK_0, _RANK_1, _NEXT_RANK_1 = (
    Pid(number=10, started_s=_BEGAN_UNIX_S - 20.0),
    Pid(number=20, started_s=_BEGAN_UNIX_S - 20.0),
    Pid(number=21, started_s=_BEGAN_UNIX_S - 20.0),
    Pid(number=22, started_s=_BEGAN_UNIX_S + 500.0),
)


def held(role: str, *, mib: float = 100.0, handles: int = 40) -> Holdings:
    return Holdings(
        role=role, memory_bytes=int(mib * _MIB), handles=handles, sockets=10, threads=12
    )


def service(at_s: float) -> dict[Pid, Holdings]:
    """Two ranks, one of them killed after 480 s and replaced by one that is larger."""
    rank_1 = {_RANK_1: held("rank")} if at_s < 480.0 else {}
    next_rank = {_NEXT_RANK_1: held("rank", mib=150.0)} if at_s >= 500.0 else {}
    return {_INGRESS: held("ingress"), _RANK_0: held("rank")} | rank_1 | next_rank


def readings(processes: Callable[[float], Mapping[Pid, Holdings]]) -> list[Reading]:
    return [
        Reading(
            at_s=float(at_s),
            unix_s=_BEGAN_UNIX_S + at_s,
            processes=processes(float(at_s)),
            shared_memory_bytes=5 * _MIB,
            num_actors=6,
        )
        for at_s in range(0, 1200, 2)
    ]


def figures(
    processes: Callable[[float], Mapping[Pid, Holdings]], *, pages: int = 0
) -> dict[str, Figure]:
    idle = [IdleReading(at_s=30.0 * i, pages_in_use=pages) for i in range(40)]
    evaluated = figures_of(readings(processes), idle, warmup_s=300.0, settle_s=60.0)
    return {figure.name: figure for figure in evaluated}


def test_a_service_that_holds_the_same_has_not_grown_although_a_rank_was_replaced() -> None:
    by_name = figures(service)
    assert not [figure.name for figure in by_name.values() if figure.has_grown]
    assert by_name["memory of rank"].first == 200.0
    assert by_name["memory of rank"].last == 250.0
    assert by_name["memory of rank"].slope is not None
    assert by_name["memory of rank"].slope.per_h == 0.0


def test_a_leak_is_found_in_its_role_and_in_its_process_and_nowhere_else() -> None:
    rng = Random(1)

    def leaks(at_s: float) -> dict[Pid, Holdings]:
        mib = 100.0 + 6.0 * at_s / 3600.0 + rng.gauss(0.0, 0.1)
        return service(at_s) | {_RANK_0: held("rank", mib=mib)}

    grown = {figure.name for figure in figures(leaks).values() if figure.has_grown}
    assert grown == {"memory of rank", "memory of rank, pid 20"}


def test_handles_that_add_up_are_found() -> None:
    grown = figures(
        lambda at_s: service(at_s) | {_INGRESS: held("ingress", handles=40 + int(at_s / 60.0))}
    )
    assert grown["handles of ingress"].has_grown
    assert not grown["sockets of ingress"].has_grown


def test_what_grows_in_rays_own_processes_is_told_and_fails_nothing() -> None:
    monitor = Pid(number=30, started_s=_BEGAN_UNIX_S - 20.0)
    by_name = figures(
        lambda at_s: service(at_s) | {monitor: held(OTHER, handles=40 + int(at_s / 60.0))}
    )
    run_outcome = outcome(figures=list(by_name.values()))
    assert complaints(run_outcome) == []
    (growth,) = growth_in_ray(run_outcome)
    assert growth.startswith("handles of other grows: ")
    assert f"in Ray's own processes: {growth}" in table(run_outcome, {})


def test_a_new_process_counts_only_when_it_has_settled() -> None:
    def settles(at_s: float) -> dict[Pid, Holdings]:
        mib = 150.0 - max(0.0, 555.0 - at_s)  # grows until it is 55 s old
        return service(at_s) | ({_NEXT_RANK_1: held("rank", mib=mib)} if at_s >= 500.0 else {})

    assert not figures(settles)["memory of rank"].has_grown


def test_what_came_before_the_warm_up_was_over_does_not_count() -> None:
    warm = figures(
        lambda at_s: service(at_s) | {_INGRESS: held("ingress", mib=100.0 + min(at_s, 290.0))}
    )
    assert not warm["memory of ingress"].has_grown
    assert warm["memory of ingress"].first == 390.0


def test_processes_that_are_never_ended_are_found_by_their_number() -> None:
    def orphans(at_s: float) -> dict[Pid, Holdings]:
        left = {Pid(100 + i, _BEGAN_UNIX_S): held("rank") for i in range(int(at_s / 100.0))}
        return {_INGRESS: held("ingress")} | left

    assert figures(orphans)["processes"].has_grown


def outcome(**changes: object) -> Outcome:
    fields = {
        "figures": list(figures(lambda at_s: {_INGRESS: held("ingress")}).values()),
        "idle": [IdleReading(at_s=30.0, pages_in_use=0)],
        "answers": Answers(),
    } | changes
    return Outcome(**fields)


def test_a_clean_run_has_no_complaint_and_each_other_one_says_what_is_wrong() -> None:
    assert complaints(outcome()) == []
    wrong = Answers()
    wrong.note("stream", "changed: no error", name="endure-7")
    for changes, message in (
        ({"idle": [IdleReading(at_s=1.0, pages_in_use=3)]}, "3 pages in use without a request"),
        ({"idle": []}, "never idle"),
        ({"answers": wrong}, "1 answers wrong: stream: changed"),
        ({"figures": []}, "too short"),
        ({"unnoticed": [4]}, "did not notice faults [4]"),
        ({"ended_early": True}, "ended early"),
    ):
        (complaint,) = complaints(outcome(**changes))
        assert message in complaint


def test_the_report_is_json_and_the_table_names_what_grows() -> None:
    leaking = figures(lambda at_s: {_INGRESS: held("ingress", mib=100.0 + at_s)})
    rows = json.loads(json.dumps([figure.as_json() for figure in leaking.values()]))
    by_name = {row["name"]: row for row in rows}
    assert by_name["memory of ingress"]["passed"] is False
    assert by_name["memory of ingress"]["per_h"] == 3600.0
    assert by_name["threads of ingress"]["passed"] is True
    text = table(outcome(figures=list(leaking.values())), {"router": 2})
    assert "faults: 2 router" in text
    assert "failed: memory of ingress grows: +3600.00 MiB" in text
