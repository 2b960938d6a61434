"""A worker's heartbeats, and when they mean that it is lost.

The heartbeat is progress: a token committed, prompt rows computed, a round finished, pages migrated
while there is work. A process that answers but makes no progress is as lost as one that does not
answer. Pure: it is told of answers and of the time that passes.
"""

from dataclasses import replace
from math import inf

from eesd_dist.workers.messages import WorkerStatus
from serve_app.pipeline.timings import Timings


class Pulse:
    """The heartbeats of one worker."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._status = WorkerStatus(epoch=0, progress=0, is_busy=False)
        self._silent_s = 0.0
        self._still_s = 0.0

    def joined(self, epoch: int) -> None:
        """Notes a new epoch: its supervisor knows of it before the next answer does."""
        self._status = replace(self._status, epoch=epoch, is_busy=False, phase="", allowed_s=0.0)
        self._silent_s = self._still_s = 0.0

    @property
    def status(self) -> WorkerStatus:
        """The last answer."""
        return self._status

    @property
    def still_s(self) -> float:
        """Seconds for which the worker has had work and made no progress, or has not answered."""
        return max(self._still_s, self._silent_s)

    def passed(self, seconds: float) -> None:
        """Time in which an answer could have been heard: not while this process was stopped."""
        self._silent_s += seconds
        self._still_s += seconds

    def received(self, status: WorkerStatus) -> None:
        before, self._status = self._status, status
        self._silent_s = 0.0
        if not (status.is_busy and _is_same_work(before, status)):
            self._still_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the worker is lost, if nothing changes."""
        return min(self._silence_s - self._silent_s, self._stillness_s - self._still_s)

    def failure(self) -> tuple[str, str] | None:
        """Returns operation and reason of the loss; None while the worker lives."""
        if self._silent_s > self._silence_s:
            return "heartbeat", f"no answer within {self._silence_s:g} s"
        if self._still_s > self._stillness_s:
            return self._status.phase or "rounds", f"no progress within {self._allowed_s:g} s"
        return None

    @property
    def _silence_s(self) -> float:
        """Longest time for which it may be silent."""
        is_starting = self._status.epoch == 0
        return max(self._timings.deadline_s, self._timings.busy_s if is_starting else 0.0)

    @property
    def _allowed_s(self) -> float:
        return max(self._timings.deadline_s, self._status.allowed_s)

    @property
    def _stillness_s(self) -> float:
        """Longest time without progress. A worker that waits for a lost one makes none either, and
        reports that first."""
        return self._allowed_s + self._timings.peers_s if self._status.is_busy else inf


def _is_same_work(before: WorkerStatus, after: WorkerStatus) -> bool:
    return before.is_busy and (before.epoch, before.phase, before.progress, before.num_moved) == (
        after.epoch,
        after.phase,
        after.progress,
        after.num_moved,
    )
