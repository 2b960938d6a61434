"""Ranks in processes are killed, stopped and cut off in the middle of rounds: no text changes."""

import gc
import json
import os
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest

from eesd_dist.bench.fuzz.cases import Case, Fault, Link, Loss, Migration, save_case
from eesd_dist.bench.fuzz.check import check
from eesd_dist.bench.fuzz.drawing.engines import degrees_of
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.rank_processes import RankProcesses
from eesd_dist.bench.fuzz.reference import PlainTexts
from tests.support.running import descendants, until
from tests.unit.bench.fuzz.conftest import MakeSource
from tests.unit.bench.fuzz.test_play import case_of

DEADLINE_S = 1.5
MIGRATION = Migration(
    turn=6,
    source=0,
    entries=("e0", "e1"),
    copy_after=0,
    adopt_after=1,
    chunk_bytes=700,
    is_adopted=True,
)


@pytest.fixture(scope="module")
def model(shelf: ModelShelf) -> str:
    """Returns a model with heads and channels that two ranks can share."""
    models = (shelf.random(3, number) for number in range(20))
    return next(model.name for model in models if 2 in degrees_of(model.spec))


def fault(kind: Literal["kill", "stop", "cut"], *, turn: int = 6, rank: int = 1) -> Fault:
    return Fault(
        kind=kind,
        turn=turn,
        engine=0,
        stage="verify",
        rank=rank,
        after=0,
        delay_s=0.002,
        is_replaced=False,
    )


def linked(sums: Literal["memory", "messages"]) -> Link:
    return Link(kind="processes", sums=sums, timeout_s=DEADLINE_S)


def cases(model: str) -> list[Case]:
    """Returns engines with two kills, one of them of draft rank 0, with a stop, and with a cut
    after a KV migration."""
    leader = replace(fault("kill", turn=9), stage="draft", rank=0)
    cut = fault("cut", turn=12, rank=0)
    memory, messages = linked("memory"), linked("messages")
    return [
        case_of(model, fault("kill"), leader, ranks=(1, 2), link=memory),
        case_of(model, fault("stop", rank=0), ranks=(1, 2), link=messages),
        case_of(model, MIGRATION, cut, num_engines=2, ranks=(2, 1), link=messages),
    ]


def test_faults_of_rank_processes_cost_rounds_and_no_token_and_leave_nothing(
    model: str, shelf: ModelShelf
) -> None:
    plain = PlainTexts(shelf)
    with closing(RankProcesses()) as processes:
        processes.give_back(processes.take())  # the server they are forked from stays
    left_before = _left()
    with closing(RankProcesses()) as processes:
        checks = [check(case, shelf, plain, processes) for case in cases(model)]
    plain.close()
    assert [checked.failures for checked in checks] == [()] * len(checks)
    assert [checked.num_tokens for checked in checks] == [120] * len(checks)
    killed, stopped, cut = (checked.counts for checked in checks)
    assert (killed["trouble kill"], killed["lost stages"], killed["lost engines"]) == (2, 2, 1)
    assert (stopped["trouble stop"], stopped["lost stages"]) == (1, 1)
    assert (cut["trouble cut"], cut["lost stages"]) == (1, 1)
    assert cut["migrated pages"] > 0
    assert cut["migrations that failed"] == 0
    deadline = time.monotonic() + 10.0  # a store's thread closes its socket
    while (left := _left() - left_before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == set()


@pytest.mark.slow
def test_the_command_replays_a_case_with_processes_and_leaves_none(
    model: str, tmp_path: Path
) -> None:
    case, scratch = tmp_path / "case.json", tmp_path / "scratch"
    scratch.mkdir()
    shared_before = _shared()
    save_case(cases(model)[0], case)
    command = [sys.executable, "-m", "eesd_dist.bench.fuzz", "--case", str(case), "--json"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    output, _ = process.communicate(timeout=120)
    report = json.loads(output)
    assert report["mismatches"] == 0
    assert report["counts"]["trouble kill"] == 2
    until(lambda: not _of_session(process.pid), timeout_s=5.0)
    assert list(scratch.iterdir()) == []
    assert _shared() <= shared_before


def test_engines_in_processes_are_drawn_with_every_fault(make_source: MakeSource) -> None:
    source = replace(make_source(4, num_models=6), in_processes=True)
    drawn = [source.case(number) for number in range(120)]
    assert {setup.link.kind for case in drawn for setup in case.engines} == {"processes"}
    assert {setup.link.sums for case in drawn for setup in case.engines} == {"memory", "messages"}
    troubles = [trouble for case in drawn for trouble in case.troubles]
    faults = [trouble for trouble in troubles if isinstance(trouble, Fault)]
    assert {fault.kind for fault in faults} == {"kill", "stop", "cut"}
    assert {fault.stage for fault in faults} == {"draft", "verify"}
    assert not any(isinstance(trouble, Loss) for trouble in troubles)
    assert not any(f.kind == "stop" and (f.stage, f.rank) == ("draft", 0) for f in faults)


def _of_session(leader: int) -> list[int]:
    """Returns the processes of a session."""
    pids = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                pids.append(pid)
    return pids


def _left() -> set[str]:
    """Returns the processes and sockets that engines may leave."""
    gc.unfreeze()
    gc.collect()  # engines refer to themselves, and have sockets
    children = {f"process {process.pid}" for process in descendants()}
    sockets = {f"{c.laddr} {c.raddr}" for c in psutil.Process().net_connections("all")}
    return children | sockets


def _shared() -> set[Path]:
    """Returns this project's and torch's files in shared memory; those of services are others."""
    folder = Path("/dev/shm")
    return {*folder.glob("eesd*"), *folder.glob("torch*")}
