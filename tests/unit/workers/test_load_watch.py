"""The loading progress of a rank, in its reports and its log."""

import logging

import pytest

from eesd_dist.types import LoadProgress
from eesd_dist.workers.load_watch import LoadWatch, peak_memory_bytes


def _progress(done: int) -> LoadProgress:
    return LoadProgress(
        bytes_done=done * 10**9, bytes_total=28 * 10**9, piece="layer 3", seconds=2.0, waited_s=0.5
    )


def test_the_latest_progress_is_told_with_the_peak_memory() -> None:
    watch = LoadWatch()
    assert watch.report() is None
    saw = watch.of("verify rank 1")
    saw(_progress(0))
    saw(_progress(12))
    report = watch.report()
    assert report is not None
    assert report.told == "43 % (12.0 of 28.0 GB)"
    assert not report.is_over
    assert 10 * 2**20 < report.peak_memory_bytes <= peak_memory_bytes()


def test_ranks_of_one_process_are_reported_together() -> None:
    watch = LoadWatch()
    watch.of("draft rank 0")(_progress(28))
    watch.of("verify rank 0")(_progress(14))
    report = watch.report()
    assert report is not None
    assert report.told == "75 % (42.0 of 56.0 GB)"
    assert (report.seconds, report.waited_s) == (4.0, 1.0)


def test_the_log_hears_of_it_every_few_seconds_and_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time_s = 0.0
    watch = LoadWatch(clock=lambda: time_s)
    saw = watch.of("verify rank 1")
    with caplog.at_level(logging.INFO, logger="eesd_dist.workers.load_watch"):
        for done in range(28):
            time_s += 1.0
            saw(_progress(done))
        assert len(caplog.records) == 5
        saw(_progress(28))
    assert len(caplog.records) == 6
    last = caplog.records[-1].getMessage()
    assert "rank=verify rank 1 progress=100 % (28.0 of 28.0 GB) bytes=28000000000" in last
    assert "seconds=2.0 waited_to_read_s=0.5" in last
