"""Signals that stop a batch: rows in flight are lost, and run again by the next job."""

import asyncio
import signal
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_CANCEL_S = 2.0
"""Longest time that a piece of work without `await`, such as a scan, goes on after a signal."""


def interrupt_at_signals() -> None:
    """Raises KeyboardInterrupt at SIGINT and SIGTERM from now on, also where no task waits."""
    for number in _NUMBERS:
        signal.signal(number, _interrupt)


def cancel_at_signals() -> None:
    """Cancels the current task at SIGINT and SIGTERM from now on, whatever handlers there are.
    Where no task gives way within 2 s, KeyboardInterrupt is raised in what runs."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        task.cancel()

    def cancel_or_interrupt(number: int, frame: FrameType | None) -> None:
        if loop.is_closed():
            _interrupt(number, frame)
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _CANCEL_S)
        loop.call_soon_threadsafe(cancel)

    for number in _NUMBERS:
        signal.signal(number, cancel_or_interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
