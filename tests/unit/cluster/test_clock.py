import pytest

from cluster.preflight.cluster_checks import check_clocks
from cluster.preflight.probe import ClockOffset, measure_offset


class _Clocks:
    """Two clocks, and a connection on which a question takes `delays_s` there and back."""

    def __init__(self, *, offset_s: float, delays_s: list[tuple[float, float]]) -> None:
        self._time_s = 1000.0
        self._offset_s = offset_s
        self._delays_s = iter(delays_s)

    def ours(self) -> float:
        return self._time_s + self._offset_s

    def other(self) -> float:
        forward_s, back_s = next(self._delays_s)
        self._time_s += forward_s
        answer = self._time_s
        self._time_s += back_s
        return answer


@pytest.mark.parametrize("offset_s", [0.0, 2.5, -2.5])
def test_an_equal_way_there_and_back_is_corrected(offset_s: float) -> None:
    clocks = _Clocks(offset_s=offset_s, delays_s=[(0.2, 0.2)])
    offset = measure_offset(clocks.other, read_ours=clocks.ours, num_readings=1)
    assert offset.offset_s == pytest.approx(offset_s)
    assert offset.uncertainty_s == pytest.approx(0.2)


def test_the_true_offset_is_within_the_uncertainty_of_an_unequal_way() -> None:
    clocks = _Clocks(offset_s=1.0, delays_s=[(0.5, 0.0)])
    offset = measure_offset(clocks.other, read_ours=clocks.ours, num_readings=1)
    assert offset.offset_s == pytest.approx(0.75)
    assert abs(offset.offset_s - 1.0) <= offset.uncertainty_s + 1e-9


def test_the_quickest_reading_counts() -> None:
    clocks = _Clocks(offset_s=1.0, delays_s=[(0.5, 0.0), (0.01, 0.01), (0.0, 0.9)])
    offset = measure_offset(clocks.other, read_ours=clocks.ours, num_readings=3)
    assert offset.offset_s == pytest.approx(1.0)
    assert offset.uncertainty_s == pytest.approx(0.01)


def test_a_difference_within_the_uncertainty_is_no_skew() -> None:
    slow = ClockOffset(offset_s=1.2, uncertainty_s=0.5)
    sure = ClockOffset(offset_s=-1.2, uncertainty_s=0.001)
    (finding,) = check_clocks({"a": slow, "b": sure}, max_skew_s=1.0)
    assert finding.nodes == ("b",)
    assert "1.200 s behind that of the head (within 1.0 ms), 1 s allowed" in finding.message
