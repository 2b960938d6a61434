"""Deadlines of work on a GPU, which its host does not wait for."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.distributed import Work

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class DeviceWork(Protocol):
    def is_completed(self) -> bool:
        """Returns True once the device is past this work. Raises RuntimeError where it may never
        be: its communicator is in error."""
        ...


class Watchdog:
    """Calls `on_timeout(operation)` once, in its own thread, when work misses its deadline.

    Work finishes in the order it was started, so only the oldest piece is polled. Work of a
    communicator in error is late at once.
    """

    def __init__(
        self, *, timeout_s: float, on_timeout: Callable[[str], None], poll_s: float = _POLL_S
    ) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._poll_s = poll_s
        self._watched: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._is_stopped = False
        self.judging = threading.Lock()
        """Held while work may be found to be late: torch may end its kernels before that."""
        self._thread = threading.Thread(target=self._run, name="nccl watchdog", daemon=True)
        self._thread.start()

    def watch(self, work: DeviceWork, *, operation: str) -> None:
        self._watched.put(_Watched(work, operation, time.monotonic() + self._timeout_s))

    def stop(self) -> None:
        """Ends the thread. Takes no lock: the garbage collector may call this at any point."""
        self._is_stopped = True
        self._watched.put(None)

    def _run(self) -> None:
        while (watched := self._watched.get()) is not None:
            if not self._is_in_time(watched):
                return

    def _is_in_time(self, watched: "_Watched") -> bool:
        while not self._is_stopped:
            with self.judging:
                try:
                    if watched.work.is_completed():
                        return True
                    is_overdue = time.monotonic() >= watched.deadline
                except RuntimeError:
                    is_overdue = self._is_in_error(watched.operation)
                if is_overdue:
                    self._on_timeout(watched.operation)
                    return False
            time.sleep(self._poll_s)
        return True

    def _is_in_error(self, operation: str) -> bool:
        """Returns whether an exception is an error of the communicator: not after its abort, which
        another thread may begin while its work is polled."""
        if not self._is_stopped:
            logger.exception("the communicator is in error: %s", operation)
        return not self._is_stopped


class _Watched(NamedTuple):
    work: DeviceWork
    operation: str
    deadline: float


class QueuedWork:
    """Work that was queued before an event. Keeps no tensor of it."""

    def __init__(
        self, event: torch.cuda.Event, firsts: Sequence[Work], stream: torch.cuda.Stream
    ) -> None:
        """`firsts`: those of the communicators; `stream`: one that nothing else is queued on."""
        self._event = event
        self._firsts = firsts
        self._stream = stream

    def is_completed(self) -> bool:
        if bool(self._event.query()):  # type: ignore[no-untyped-call]
            return True
        # torch calls work of a communicator in error completed, while its kernel waits for ever.
        for first in self._firsts:
            if first.is_completed():  # looks for such an error
                with torch.cuda.stream(self._stream):
                    first.wait()  # raises it
        return False
