"""A thread that makes masks outside the round loop.

Callers take turns, and so do the grammars of each. Knows nothing of what a mask may cost.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from eesd_dist.engine.masks.text import ConstrainedText

_ENDS_WITHIN_S = 10.0
_NUM_TURNS = 4096
_IDLE_S = 10.0
"""The thread ends after so long without work, and starts again with the next."""


class MadeMask(NamedTuple):
    mask: bytes
    seconds: float
    """Time that it has cost, without waiting for other threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskJob:
    """Work on one text: reading its tokens, and making the mask after them."""

    text: ConstrainedText
    run: Callable[[], MadeMask]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskResult:
    text: ConstrainedText
    mask: bytes | None
    """None: the work failed, or has not ended in time."""
    seconds: float
    error: str | None = None


class MaskLane:
    """Runs one job at a time. All methods but the thread's own are the round loop's."""

    def __init__(self, name: str, *, wake: Callable[[], None]) -> None:
        """`wake` is called after each job, in the thread."""
        self._name = name
        self._wake = wake
        self._changed = threading.Condition()
        self._waiting: list[MaskJob] = []
        self._running: tuple[MaskJob, float] | None = None
        self._results: deque[MaskResult] = deque()
        self._turns: dict[tuple[str, bytes | None], int] = {}
        """Caller, or caller and grammar -> the turn in which it was served last."""
        self._num_turns = 0
        self._thread: threading.Thread | None = None
        """The thread that takes the next job; None: the next job starts one."""
        _LANES.add(self)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._results)

    def ask(self, job: MaskJob) -> None:
        with self._changed:
            self._waiting.append(job)
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def drop(self, text: ConstrainedText) -> None:
        """Takes a text's job out of the queue; one that runs goes on."""
        with self._changed:
            self._waiting = [job for job in self._waiting if job.text is not text]

    def results(self, *, wait_s: float = 0.0, limit_s: float) -> list[MaskResult]:
        """Returns what has ended, waiting so long for all the work. A job that has run longer than
        `limit_s` ends with an error, and another thread takes the next one."""
        with self._changed:
            if wait_s > 0:
                self._changed.wait_for(lambda: not (self._waiting or self._running), wait_s)
            results = list(self._results)
            self._results.clear()
            if self._running is not None and time.perf_counter() - self._running[1] > limit_s:
                job, since = self._running
                results.append(_overdue(job, time.perf_counter() - since))
                self._running, self._thread = None, None
                if self._waiting:
                    self._start()
        return results

    def close(self) -> None:
        """Ends the thread; one that makes a mask ends after it."""
        with self._changed:
            self._waiting.clear()
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout=_ENDS_WITHIN_S)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (job := self._next(me)) is not None:
            result = _result_of(job)
            with self._changed:
                if self._thread is not me:  # closed, or the job was overdue
                    return
                self._results.append(result)
                self._running = None
                self._changed.notify_all()
            self._wake()

    def _next(self, me: threading.Thread) -> MaskJob | None:
        """Waits for a job; None: this thread ends."""
        with self._changed:
            while self._thread is me:
                if self._waiting:
                    job = self._take()
                    self._running = job, time.perf_counter()
                    return job
                if not self._changed.wait(_IDLE_S) and not self._waiting:
                    self._turns.clear()
                    if self._thread is me:
                        self._thread = None
            return None

    def _take(self) -> MaskJob:
        """Takes the job of the caller that was served least recently, and of its grammars that of
        the one served least recently."""
        turns = self._turns
        job = min(
            self._waiting,
            key=lambda candidate: (
                turns.get((candidate.text.caller, None), 0),
                turns.get((candidate.text.caller, candidate.text.digest), 0),
            ),
        )
        self._waiting.remove(job)
        if len(turns) > _NUM_TURNS:
            turns.clear()
        self._num_turns += 1
        caller, digest = job.text.caller, job.text.digest
        turns[caller, None] = turns[caller, digest] = self._num_turns
        return job


_LANES: "weakref.WeakSet[MaskLane]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends threads of engines that were not closed: the interpreter must not end before them."""
    for lane in list(_LANES):
        lane.close()


def _result_of(job: MaskJob) -> MaskResult:
    try:
        mask, seconds = job.run()
    except Exception as trouble:  # whatever a matcher raises ends its text alone
        error = f"{type(trouble).__name__}: {trouble}"
        return MaskResult(text=job.text, mask=None, seconds=0.0, error=error)
    return MaskResult(text=job.text, mask=mask, seconds=seconds)


def _overdue(job: MaskJob, seconds: float) -> MaskResult:
    error = f"one mask has taken more than {seconds:.1f} s"
    return MaskResult(text=job.text, mask=None, seconds=seconds, error=error)
