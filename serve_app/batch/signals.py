"""Signals that stop a batch: rows in flight are lost, and run again by the next job."""

import asyncio
import signal


def cancel_at_signals() -> None:
    """Cancels the current task at SIGINT and SIGTERM from now on, whatever handlers there are."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
