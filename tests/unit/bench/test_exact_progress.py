"""The progress output of `eesd bench exact`."""

from eesd_dist.bench.exact import ExactTally, Progress, duration


def test_a_line_for_each_setting_says_how_long_the_rest_will_take() -> None:
    lines: list[str] = []
    times = iter([0.0, 20.0, 30.0])
    progress = Progress(num_groups=12, report=lines.append, clock=lambda: next(times))
    progress.finished(ExactTally(tokens=100, mismatches=0))
    progress.finished(ExactTally(tokens=50, mismatches=2))
    assert lines == [
        "  1/12 settings, 100 tokens, 0 differ, about 4 min left",
        "  2/12 settings, 150 tokens, 2 differ, about 2 min left",
    ]


def test_durations_are_told_as_people_tell_them() -> None:
    assert [duration(s) for s in (0.4, 89, 600, 7500)] == ["0 s", "89 s", "10 min", "2 h 05 min"]
