"""The deadline of work on a GPU, tested with toy work."""

import threading

from eesd_dist.transport.nccl import Watchdog


class ToyWork:
    def __init__(self, *, done: bool) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


def test_work_that_never_finishes_is_reported_once_by_its_name() -> None:
    reported: list[str] = []
    late = threading.Event()

    def on_late(operation: str) -> None:
        reported.append(operation)
        late.set()

    watchdog = Watchdog(timeout_s=0.05, on_late=on_late, poll_s=0.005)
    watchdog.watch(ToyWork(done=True), operation="all_reduce")
    watchdog.watch(ToyWork(done=False), operation="round 17")
    watchdog.watch(ToyWork(done=False), operation="round 18")
    assert late.wait(5.0)
    assert reported == ["round 17"]


def test_work_in_time_and_work_after_stop_are_not_reported() -> None:
    late = threading.Event()
    watchdog = Watchdog(timeout_s=0.05, on_late=lambda _: late.set(), poll_s=0.005)
    watchdog.watch(ToyWork(done=True), operation="all_reduce")
    watchdog.stop()
    watchdog.watch(ToyWork(done=False), operation="round 17")
    assert not late.wait(0.2)
