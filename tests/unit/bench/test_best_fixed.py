"""The best fixed length is chosen by other prompts than those it is measured on."""

import pytest

from eesd_dist.bench.best_fixed import (
    PromptTimes,
    against_others_choice,
    mean_over_other,
    over_other,
)


def test_each_prompt_is_compared_with_the_choice_of_the_others() -> None:
    fixed_s = {"fixed 1": [1.0, 9.0, 2.0], "fixed 2": [3.0, 3.0, 3.0]}
    times = against_others_choice([2.0, 2.0, 2.0], fixed_s)
    # Without the second prompt, the first length looks best: it is slow there.
    assert [row.other_s for row in times] == [3.0, 9.0, 3.0]
    assert over_other(times).value == pytest.approx(15.0 / 6.0)


def test_luck_is_no_advantage() -> None:
    """All lengths are equal but for noise: chosen on the prompts themselves, one would look
    faster."""
    noise = [[0.8, 1.2, 1.0, 1.0], [1.2, 0.8, 1.0, 1.0], [1.0, 1.0, 0.8, 1.2]]
    fixed_s = {f"fixed {length}": seconds for length, seconds in enumerate(noise)}
    assert over_other(against_others_choice([1.0] * 4, fixed_s)).value >= 1.0


def test_the_interval_contains_the_mean_over_classes() -> None:
    easy = [PromptTimes(ours_s=1.0, other_s=s) for s in (1.1, 1.3, 1.2, 1.4)]
    hard = [PromptTimes(ours_s=1.0, other_s=s) for s in (0.9, 0.8, 1.0, 0.9)]
    interval = mean_over_other([easy, hard])
    assert interval.value == pytest.approx(0.5 * (1.25 + 0.9))
    assert 1.0 < interval.low < interval.value < interval.high < 1.2
    assert over_other(easy).low > 1.0
