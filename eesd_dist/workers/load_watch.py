"""Progress of loading a rank's weights, for status reports and the log.

Written by the loading thread and read by the actor's event loop, as one frozen value. Peak memory
is that of the process since its start, mapped files included.
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
    """Keeps the progress of the latest load of each rank in an actor process."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._progress: dict[str, LoadProgress] = {}
        """Latest progress by rank: a process may hold one of each stage."""
        self._report: LoadReport | None = None
        self._report_s = clock()

    def report(self) -> LoadReport | None:
        """Returns the latest progress, of all ranks together; None before loading begins."""
        return self._report

    def of(self, rank: str) -> Callable[[LoadProgress], None]:
        """Returns the progress callback for the load of this rank."""

        def saw(progress: LoadProgress) -> None:
            self._progress[rank] = progress
            loads = self._progress.values()
            report = LoadReport(
                bytes_done=sum(load.bytes_done for load in loads),
                bytes_total=sum(load.bytes_total for load in loads),
                module=progress.piece,
                seconds=sum(load.seconds for load in loads),
                waited_s=sum(load.waited_s for load in loads),
                peak_memory_bytes=peak_memory_bytes(),
            )
            self._report = report
            is_over = report.bytes_done == report.bytes_total
            if is_over or self._clock() - self._report_s >= _TELL_EVERY_S:
                self._report_s = self._clock()
                logger.info(
                    "loading: rank=%s progress=%s bytes=%d seconds=%.1f waited_to_read_s=%.1f "
                    "peak_memory_gb=%.1f",
                    rank,
                    report.told,
                    report.bytes_done,
                    report.seconds,
                    report.waited_s,
                    report.peak_memory_bytes / 1e9,
                )

        return saw


def peak_memory_bytes() -> int:
    """Returns the peak memory of this process; `ru_maxrss` may include the process before exec."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if peak is not None:
        return int(peak[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
