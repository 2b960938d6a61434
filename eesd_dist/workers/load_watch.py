"""How far a rank is with reading its weights, for whoever asks, and a line in the log now and then.

Written by the thread that loads, read by the actor's event loop: what is handed over is one frozen
value. Peak memory is the process's own since it was started, mapped files included.
"""

import logging
import re
import resource
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from eesd_dist.types import LoadProgress
from eesd_dist.workers.messages import LoadReport

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 5.0


class LoadWatch:
    """One per actor process; a later load takes the place of an earlier one."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._report: LoadReport | None = None
        self._told_s = clock()

    def report(self) -> LoadReport | None:
        """None before anything was loaded."""
        return self._report

    def of(self, rank: str) -> Callable[[LoadProgress], None]:
        """What the load of this rank tells its progress to."""

        def saw(progress: LoadProgress) -> None:
            report = LoadReport(
                bytes_done=progress.bytes_done,
                bytes_total=progress.bytes_total,
                piece=progress.piece,
                seconds=progress.seconds,
                peak_memory_bytes=peak_memory_bytes(),
            )
            self._report = report
            is_over = report.bytes_done == report.bytes_total
            if is_over or self._clock() - self._told_s >= _TELL_EVERY_S:
                self._told_s = self._clock()
                logger.info(
                    "loading: %s %s after %.1f s, peak memory %.1f GB",
                    rank,
                    report.told,
                    report.seconds,
                    report.peak_memory_bytes / 1e9,
                )

        return saw


def peak_memory_bytes() -> int:
    """Most memory this process has had; `ru_maxrss` may be that of the process before exec."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
