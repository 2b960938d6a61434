"""Signals that stop a batch: rows in flight are lost, and run again by the next job."""

import asyncio
import signal
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def interrupt_at_signals() -> None:
    """Raises KeyboardInterrupt at SIGINT and SIGTERM from now on, also where no task waits."""
    for number in _NUMBERS:
        signal.signal(number, _interrupt)


def cancel_at_signals() -> None:
    """Cancels the current task at SIGINT and SIGTERM from now on, whatever handlers there are."""
    task = asyncio.current_task()
    assert task is not None
    for number in _NUMBERS:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
