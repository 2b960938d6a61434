import pytest

from serve_app.batch.timeline import Timeline


def test_tokens_are_spread_over_the_time_that_they_took() -> None:
    timeline = Timeline()
    timeline.add(0.1, 1.1, num_tokens=100)
    assert sum(timeline.num_tokens) == pytest.approx(100)
    assert timeline.rates()[1] == pytest.approx(100)  # a bin within
    assert timeline.rates()[0] == pytest.approx(60)  # 0.15 of its 0.25 s
    timeline.add(2.0, 2.0, num_tokens=7)
    assert sum(timeline.num_tokens) == pytest.approx(107)


def test_memory_is_bounded_however_long_the_run_is() -> None:
    timeline = Timeline()
    for second in range(100_000):
        timeline.add(second, second + 0.9, num_tokens=10)
    assert len(timeline.num_tokens) <= 512
    assert sum(timeline.num_tokens) == pytest.approx(1_000_000)
    assert sum(timeline.num_rows) == 100_000
    assert timeline.tail_over_peak() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("last_rate", "expected"), [(100, 1.0), (30, 0.3)])
def test_the_tail_is_compared_with_the_best_tenth_of_the_run(
    last_rate: int, expected: float
) -> None:
    timeline = Timeline()
    for second in range(20, 110):
        timeline.add(second, second + 1 - 1e-9, num_tokens=100)
    for number in range(10):  # the last tenth of the rows
        begin_s = 110 + number * 100 / last_rate
        timeline.add(begin_s, begin_s + 100 / last_rate - 1e-9, num_tokens=100)
    assert timeline.first_token_s() == 20
    assert timeline.tail_over_peak() == pytest.approx(expected, rel=0.02)


def test_a_run_without_tokens_has_no_tail() -> None:
    timeline = Timeline()
    assert timeline.tail_over_peak() is None
    timeline.add(0.0, 1.0, num_tokens=0)
    timeline.add(0.0, 3.0, num_tokens=0)
    assert timeline.tail_over_peak() is None


def test_a_tail_ends_with_its_last_row_and_not_with_the_last_bin() -> None:
    timeline = Timeline()
    for wave in range(4):
        begin_s = 2.51 * wave
        for _ in range(50):
            timeline.add(begin_s, begin_s + 2.51, num_tokens=128)
    assert timeline.tail_over_peak() == pytest.approx(1.0, abs=0.02)
