"""The deadline of work on a GPU, tested with toy work."""

import threading

import pytest

from eesd_dist.transport.watchdog import Watchdog


class ToyWork:
    def __init__(self, *, done: bool | None) -> None:
        """`done`: None raises an error."""
        self.done = done

    def is_completed(self) -> bool:
        if self.done is None:
            raise RuntimeError("NCCL error: remote process exited")
        return self.done


def test_work_that_never_finishes_is_reported_once_by_its_name() -> None:
    reported: list[str] = []
    timeout = threading.Event()

    def on_timeout(operation: str) -> None:
        reported.append(operation)
        timeout.set()

    watchdog = Watchdog(timeout_s=0.05, on_timeout=on_timeout, poll_s=0.005)
    watchdog.watch(ToyWork(done=True), operation="all_reduce")
    watchdog.watch(ToyWork(done=False), operation="round 17")
    watchdog.watch(ToyWork(done=False), operation="round 18")
    assert timeout.wait(5.0)
    assert reported == ["round 17"]


def test_work_of_a_communicator_in_error_is_late_at_once() -> None:
    """A rank that died before or during a sum was never noticed: its work counted as done."""
    reported: list[str] = []
    timeout = threading.Event()

    def on_timeout(operation: str) -> None:
        reported.append(operation)
        timeout.set()

    watchdog = Watchdog(timeout_s=60.0, on_timeout=on_timeout, poll_s=0.005)
    watchdog.watch(ToyWork(done=True), operation="all_reduce")
    watchdog.watch(ToyWork(done=None), operation="round 17")
    assert timeout.wait(5.0)
    assert reported == ["round 17"]


def test_work_in_time_and_work_after_stop_are_not_reported() -> None:
    timeout = threading.Event()
    watchdog = Watchdog(timeout_s=0.05, on_timeout=lambda _: timeout.set(), poll_s=0.005)
    watchdog.watch(ToyWork(done=True), operation="all_reduce")
    watchdog.stop()
    watchdog.watch(ToyWork(done=False), operation="round 17")
    assert not timeout.wait(0.2)


def test_an_error_of_a_communicator_that_was_aborted_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timeout, is_polled = threading.Event(), threading.Event()

    class AbortedWork(ToyWork):
        def is_completed(self) -> bool:
            watchdog.stop()  # as from another thread, during this call
            is_polled.set()
            raise RuntimeError("NCCL communicator was aborted")

    watchdog = Watchdog(timeout_s=60.0, on_timeout=lambda _: timeout.set(), poll_s=0.005)
    watchdog.watch(AbortedWork(done=False), operation="round 17")
    assert is_polled.wait(5.0)
    watchdog._thread.join(5.0)
    assert not timeout.is_set()
    assert not caplog.records
