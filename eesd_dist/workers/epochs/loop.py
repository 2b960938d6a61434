"""A blocking data-plane loop in a thread of an actor, which keeps answering calls."""

import asyncio
import ctypes
import logging
import sys
import threading
from collections.abc import Callable

from eesd_dist.errors import EesdError, EngineError
from eesd_dist.workers.messages import LoopEnd

logger = logging.getLogger(__name__)

LOOP_THREAD = "eesd-loop"
"""The name of a loop's thread in the operating system, shown by `top -H`, gdb and /proc."""
ABORT_WAIT_S = 5.0
"""Time that an aborted loop is waited for."""
_PR_SET_NAME = 15


class LoopThread:
    """Runs `body` in a thread until it returns or raises. Must be built in the event loop that
    waits for its end."""

    def __init__(self, body: Callable[[], None], *, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[LoopEnd] = self._loop.create_future()
        # An argument, not an attribute: the body may refer to this object.
        self._thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        self._thread.start()

    async def end(self) -> LoopEnd:
        """Waits until the loop has ended and returns why. Any number of callers may wait."""
        return await asyncio.shield(self._end)

    async def ended_within(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait({self._end}, timeout=timeout_s)
        return bool(done)

    def _run(self, body: Callable[[], None]) -> None:
        _name_thread(LOOP_THREAD)
        error: EesdError | None = None
        try:
            body()
        except EesdError as raised:
            error = raised
            logger.warning("loop ended: loop=%s error=%s", self._name, raised)
        except Exception as raised:  # a bug: nothing above would report it
            logger.exception("loop broke: loop=%s", self._name)
            error = EngineError(f"{self._name} broke: {type(raised).__name__}: {raised}")
        if error is not None:
            _forget_frames(error)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, LoopEnd(error=error))

    def _settle(self, end: LoopEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)


def _forget_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error and its causes. Their frames hold the error and all groups
    of the epoch, with threads and sockets, until the garbage collector finds the circle."""
    causes = [error]
    while causes:
        cause = causes.pop()
        cause.__traceback__ = None
        causes += [parent for parent in (cause.__cause__, cause.__context__) if parent is not None]


def _name_thread(name: str) -> None:
    """Names the calling thread for the operating system, as Python does since 3.14. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
