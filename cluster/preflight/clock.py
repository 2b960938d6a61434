"""The difference between two clocks, measured over a connection with an unknown delay.

D. Mills, RFC 5905 section 8: the other clock is read between two readings of ours, and is compared
with their middle; the error is at most half of the time between them. Of several readings the
quickest is used.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

NUM_READINGS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Seconds that our clock is ahead of the other; negative if it is behind."""

    offset_s: float
    uncertainty_s: float

    @property
    def least_s(self) -> float:
        """The smallest difference that the readings allow."""
        return max(0.0, abs(self.offset_s) - self.uncertainty_s)


def measure_offset(
    read_other: Callable[[], float],
    *,
    read_ours: Callable[[], float],
    num_readings: int = NUM_READINGS,
) -> ClockOffset:
    """Both functions return seconds since the epoch. Raises what `read_other` raises."""
    return _quickest(_reading(read_other, read_ours) for _ in range(num_readings))


def _reading(read_other: Callable[[], float], read_ours: Callable[[], float]) -> ClockOffset:
    before = read_ours()
    other = read_other()
    after = read_ours()
    return ClockOffset(offset_s=(before + after) / 2 - other, uncertainty_s=abs(after - before) / 2)


def _quickest(readings: Iterable[ClockOffset]) -> ClockOffset:
    return min(readings, key=lambda reading: reading.uncertainty_s)
