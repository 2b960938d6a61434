"""The combinations of a sweep and its report: measured time decides, not acceptance."""

from pathlib import Path

import pytest

from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.sweep import (
    Combination,
    SweepReport,
    SweepRow,
    Tries,
    _measured,
    recommendation,
    sweep,
    table,
)
from eesd_dist.errors import ConfigError
from tests.support.tiny_features import write_tiny_features, write_tiny_target
from tests.support.tiny_sweep import sweep_request


def test_a_layer_that_was_not_collected_is_missed_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    target = write_tiny_target(tmp_path / "target")
    write_tiny_features(tmp_path / "features", target)
    deep = Combination(exit_layer=2, head="own")
    request = sweep_request(target, tmp_path / "features", tmp_path / "out", deep)
    with pytest.raises(ConfigError, match=r"layers \[1\], none after \[2\].*--exits 2"):
        sweep(request, executor=LocalExecutor(), say=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_what_an_earlier_command_measured_stays_in_the_report(tmp_path: Path) -> None:
    for name in ("exit_1_own", "exit_2_truncated", "exit_12_shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text("{}")
    (tmp_path / "exit_4_own").mkdir()  # trained, but not measured yet
    (tmp_path / "exit_notes").mkdir()
    assert {combination.name for combination in _measured(tmp_path)} == {
        "exit_1_own",
        "exit_2_truncated",
        "exit_12_shared",
    }


def test_combinations_are_each_exit_with_each_head_once() -> None:
    tried = Tries(exits=(4, 1, 1), heads=("shared", "own")).combinations()
    assert [combination.name for combination in tried] == [
        "exit_1_shared",
        "exit_1_own",
        "exit_4_shared",
        "exit_4_own",
    ]


def row(name: str, *, acceptance: float, over_plain: float, step_ms: float = 1.0) -> SweepRow:
    return SweepRow(
        name=name,
        exit_layer=1,
        head="own",
        num_parameters=1000,
        agreement=acceptance,
        one_minus_tv=acceptance,
        acceptance=acceptance,
        draft_step_ms=step_ms,
        tokens_per_round=2.0,
        tokens_per_s=100.0 * over_plain,
        plain_tokens_per_s=100.0,
        over_plain=over_plain,
        low=over_plain - 0.05,
        high=over_plain + 0.05,
        texts_unlike_plain=0,
    )


def test_the_fastest_is_taken_and_the_likelier_one_is_said_to_lose() -> None:
    fast = row("exit_1", acceptance=0.62, over_plain=1.8, step_ms=0.9)
    deep = row("exit_4", acceptance=0.74, over_plain=1.3, step_ms=2.4)
    report = SweepReport(rows=(fast, deep))
    assert report.best is fast
    text = recommendation(report)
    assert text.startswith("Take exit_1: 180.0 tokens/s where plain decoding gives 100.0, 1.80x")
    assert "exit_4 is accepted more often (0.740 against 0.620) and loses" in text
    assert "2.40 ms against 0.90" in text
    assert "Not significantly slower" not in text
    assert text in table(report)


def test_a_likelier_rival_is_not_said_to_lose() -> None:
    first = row("exit_1", acceptance=0.6, over_plain=1.50)
    close = row("exit_2", acceptance=0.7, over_plain=1.45)
    text = recommendation(SweepReport(rows=(first, close)))
    assert "loses" not in text
    assert "Not significantly slower: exit_2" in text


def test_a_best_that_may_be_no_faster_than_plain_decoding_says_so() -> None:
    narrow = row("exit_1", acceptance=0.6, over_plain=1.02)
    assert "difference to plain decoding is not significant" in recommendation(
        SweepReport(rows=(narrow,))
    )


def test_rivals_within_the_noise_are_named() -> None:
    first = row("exit_1", acceptance=0.7, over_plain=1.50)
    close = row("exit_2", acceptance=0.6, over_plain=1.45)
    assert "Not significantly slower: exit_2" in recommendation(SweepReport(rows=(first, close)))


def test_nothing_is_recommended_when_plain_decoding_is_faster() -> None:
    report = SweepReport(rows=(row("exit_4", acceptance=0.9, over_plain=0.8),))
    assert report.best is None
    assert recommendation(report).startswith("Take none")
