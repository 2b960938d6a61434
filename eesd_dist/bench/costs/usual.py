"""The usual time of something that was timed repeatedly."""

import statistics
from collections.abc import Sequence


def usual_s(times: Sequence[float]) -> float:
    """Returns the lower quartile: on a shared machine disturbances only make a run longer."""
    if len(times) == 1:
        return times[0]
    return statistics.quantiles(times, n=4, method="inclusive")[0]
