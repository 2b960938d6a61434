"""A blocking data-plane loop in a thread of an actor, which keeps answering calls.

`RoundLoop` is that of a drafting actor: rounds, their results, and the loop's progress.
"""

import asyncio
import ctypes
import logging
import sys
import threading
from collections.abc import Callable

from eesd_dist.errors import EesdError, EngineError
from eesd_dist.workers.messages import LoopEnd
from eesd_dist.workers.roles import DraftEpoch, StepLike

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


_IDLE_WAIT_S = 0.25
_NUM_QUIET = 2
"""Steps in a row without a result: one may have begun a round; after two none is in flight."""


class RoundLoop:
    """Owns the round loop of one epoch, and stops it."""

    def __init__(
        self, draft_epoch: DraftEpoch, *, epoch: int, name: str, deliver: Callable[[StepLike], None]
    ) -> None:
        """Begins at once. `deliver` is called in the event loop."""
        self.draft_epoch = draft_epoch
        self.epoch = epoch
        self._num_computed = 0
        """Tokens committed and prompt rows computed; written by the loop's thread alone, as the two
        below."""
        self._num_waits = 0
        """Turns in which nothing could run before a mask was there: each mask has a deadline."""
        self._deliver = deliver
        self._event_loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._halting = threading.Event()
        self._num_turns = 0
        self._loud_turn = 0
        """The last turn with a result; both are written by the loop's thread alone."""
        self._disturbed_turn = 0
        self.thread = LoopThread(self._turn, name=name)

    @property
    def is_quiet(self) -> bool:
        """Returns whether no round is in flight with a request that was there at `disturb`."""
        return self._num_turns - max(self._loud_turn, self._disturbed_turn) > _NUM_QUIET

    @property
    def has_computed(self) -> bool:
        """True if a token was committed, or a prompt row computed."""
        return self._num_computed > 0

    def progress_of(self, *, has_work: bool) -> int:
        """Returns a number that changes as long as the loop makes progress: with work, a turn that
        computes nothing is none."""
        return self._num_computed + self._num_waits if has_work else -self._num_turns

    def disturb(self) -> None:
        """Notes that the engine's requests have changed."""
        self._disturbed_turn = self._num_turns

    def _turn(self) -> None:
        while not self._stopping.is_set():
            result = self.draft_epoch.step(wait_s=_IDLE_WAIT_S)
            self._num_turns += 1
            if result.rounds or result.emissions:
                self._loud_turn = self._num_turns
                self._num_computed += sum(r.num_emitted + r.num_prefill_rows for r in result.rounds)
                self._event_loop.call_soon_threadsafe(self._deliver, result)
                continue
            self._num_waits += result.awaits_masks
            if self._halting.is_set() and self._num_turns - self._loud_turn >= _NUM_QUIET:
                return

    async def halt(self) -> bool:
        """Ends the loop once no round is in flight; returns whether it has ended."""
        self._halting.set()
        return await self.thread.ended_within(ABORT_WAIT_S)

    async def stop(self) -> bool:
        """Ends the loop; returns whether it has ended."""
        self._stopping.set()
        self.draft_epoch.abort()
        return await self.thread.ended_within(ABORT_WAIT_S)
