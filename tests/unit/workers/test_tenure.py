"""A worker ends without a supervisor, and has one at a time."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from eesd_dist.errors import LeaseLost
from eesd_dist.workers import tenure
from eesd_dist.workers.messages import Lease, ProcessInfo, WorkerIdentity
from eesd_dist.workers.tenure import Tenure

IDENTITY = WorkerIdentity(app="app", pipeline="p", slot="verify rank 0", digest="d")
INFO = ProcessInfo(pid=1, host="h", node_id="n")
LONG_S = 60.0


def _held(*, lease_s: float, expired: Callable[[], None] = lambda: None) -> Tenure:
    return Tenure(IDENTITY, lease_s=lease_s, expired=expired, tick_s=0.02)


def _lease(owner: str, *, seconds: float = LONG_S, start_s: float | None = None) -> Lease:
    return Lease(owner=owner, seconds=seconds, start_s=start_s)


def test_a_worker_without_a_supervisor_ends_when_its_first_lease_is_over() -> None:
    ended = threading.Event()
    began_s = time.monotonic()
    _held(lease_s=0.2, expired=ended.set)
    assert ended.wait(10.0)
    assert time.monotonic() - began_s >= 0.2


def test_a_lease_that_is_renewed_goes_on_and_ends_when_it_is_renewed_no_longer() -> None:
    ended = threading.Event()
    worker = _held(lease_s=LONG_S, expired=ended.set)
    for _ in range(10):
        worker.renew(_lease("one", seconds=2.0))
        time.sleep(0.25)
    assert not ended.is_set()
    worker.renew(_lease("one", seconds=0.1))
    assert ended.wait(10.0)


def test_the_first_supervisor_to_renew_owns_the_worker_and_another_has_lost_it() -> None:
    worker = _held(lease_s=LONG_S)
    worker.renew(_lease("one"))
    with pytest.raises(LeaseLost, match="verify rank 0 of p has another supervisor: one, not two"):
        worker.renew(_lease("two"))
    worker.renew(_lease("one"))


def test_of_two_supervisors_that_claim_the_worker_of_a_dead_one_one_wins() -> None:
    worker = _held(lease_s=LONG_S)
    worker.renew(_lease("dead"))
    assert worker.claim(_lease("two"), of="dead") == IDENTITY
    with pytest.raises(LeaseLost, match="is claimed by two"):
        worker.claim(_lease("three"), of="dead")
    assert worker.claim(_lease("two"), of="dead") == IDENTITY, "its reply may have been lost"
    worker.renew(_lease("two"))
    with pytest.raises(LeaseLost):
        worker.renew(_lease("dead"))


def test_a_worker_that_never_had_a_supervisor_can_be_claimed_by_one() -> None:
    worker = _held(lease_s=LONG_S)
    worker.claim(_lease("one"), of="")
    with pytest.raises(LeaseLost):
        worker.claim(_lease("two"), of="")


def test_a_claim_holds_as_long_as_a_renewal() -> None:
    ended = threading.Event()
    worker = _held(lease_s=0.5, expired=ended.set)
    worker.claim(_lease("one"), of="")
    assert not ended.wait(1.0)
    worker.claim(_lease("two", seconds=0.1), of="one")
    assert ended.wait(10.0)


def test_a_worker_tells_the_next_supervisor_what_its_last_one_knew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenure, "process_info", lambda: INFO)
    worker = _held(lease_s=LONG_S)
    new = worker.tenancy(epoch=0, newest_epoch=0, num_pages=0, is_degraded=False)
    assert (new.owner, new.start_s, new.identity, new.process_info) == ("", None, IDENTITY, INFO)
    worker.renew(_lease("one", start_s=41.5))
    tenancy = worker.tenancy(epoch=7, newest_epoch=8, num_pages=64, is_degraded=True, head="/head")
    assert (tenancy.owner, tenancy.start_s, tenancy.num_pages) == ("one", 41.5, 64)
    assert (tenancy.epoch, tenancy.newest_epoch, tenancy.is_degraded, tenancy.head) == (
        7,
        8,
        True,
        "/head",
    )


def test_of_workers_that_leave_together_one_sees_that_it_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenure, "_POLL_S", 0.01)
    for _ in range(20):
        present = {f"p/{i}" for i in range(5)}
        last = []

        def leave(name: str, present: set[str] = present, last: list[str] = last) -> None:
            if tenure._is_last(name, lambda: tuple(present)):
                last.append(name)
            time.sleep(0.02)  # Ray lists a process for a moment after its end
            present.discard(name)

        threads = [threading.Thread(target=leave, args=(name,)) for name in sorted(present)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert last == ["p/0"]


def test_a_worker_does_not_wait_for_ever_for_one_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenure, "LAST_WAIT_S", 0.1)
    monkeypatch.setattr(tenure, "_POLL_S", 0.01)
    assert not tenure._is_last("p/0", lambda: ("p/0", "p/1"))


_WORKER = """
import os, time
from eesd_dist.workers.messages import WorkerIdentity
from eesd_dist.workers.tenure import Tenure

def expired():
    print("expired", flush=True)
    os._exit(0)

identity = WorkerIdentity(app="app", pipeline="p", slot="verify rank 0", digest="d")
Tenure(identity, lease_s=2.0, expired=expired, tick_s=0.02)
began_s = time.monotonic()
print("began", flush=True)
while time.monotonic() - began_s < 3.0:
    time.sleep(0.01)
print("survived", flush=True)
time.sleep(60.0)
"""


def test_a_process_that_was_stopped_for_longer_than_its_lease_keeps_it() -> None:
    with subprocess.Popen([sys.executable, "-c", _WORKER], stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        assert p.stdout.readline() == "began\n"
        p.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        p.send_signal(signal.SIGCONT)
        assert p.stdout.read() == "survived\nexpired\n", "it runs down again afterwards"
        assert p.wait() == 0
