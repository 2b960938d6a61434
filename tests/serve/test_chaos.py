"""`eesd bench chaos` on a service of its own: processes die, and no stream is the worse for it."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from serve_app.bench.chaos.faults import fault_named
from serve_app.bench.chaos.threads import why_untraceable


def _chaos(*words: str, timeout_s: float) -> dict[str, Any]:
    """The report, of a run that has found nothing wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli.main", "bench", "chaos", "--json", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, report["not_the_same"]
    assert (report["lost"], report["repeated"], report["changed"]) == (0, 0, 0)
    return report


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_streams_outlive_the_processes_under_them() -> None:
    kinds = ["--kinds", "verify rank", "drafting actor"]
    # Long streams and short gaps: every kill finds some under way.
    words = ["--requests", "6", "--kills", "2", "--max-tokens", "160", "--gap-s", "0.1", *kinds]
    report = _chaos(*words, "--concurrency", "4", "--at-once", "0", timeout_s=580)
    assert report["requests"] == 6
    assert report["kills"] == 2
    assert report["interruptions"] >= 2
    assert 0 < report["recovery_p50_s"] <= report["recovery_p95_s"]
    assert report["provenance"]["seed"] == 0


_STANDSTILLS = ("stuck thread", "stuck thread with the GIL", "spinning loop", "silent peer")
_WORKER = re.compile(r"drafting actor|verify rank \d")


@pytest.mark.skipif(bool(why_untraceable()), reason=why_untraceable())
@pytest.mark.parametrize(
    "deadline_s",
    [
        pytest.param(4, id="a deadline of 4 s", marks=pytest.mark.nightly),
        pytest.param(None, id="the defaults", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_a_standstill_of_every_kind_is_noticed_in_time_and_named(deadline_s: int | None) -> None:
    words = ["--requests", "6", "--kills", "4", "--max-tokens", "240", "--gap-s", "0.1"]
    words += ["--concurrency", "4", "--at-once", "0", "--kinds", *_STANDSTILLS]
    # Starting spares keep two cores busy while the faults need answers within 1.5 s.
    words += ["--set", "recovery.spares.draft=0", "--set", "recovery.spares.verify=0"]
    words += [] if deadline_s is None else ["--deadline-s", str(deadline_s)]
    report = _chaos(*words, timeout_s=580)
    assert {row["kind"] for row in report["faults"]} == set(_STANDSTILLS), report["missed"]
    for row in report["faults"]:
        assert row["noticed_s"] <= (22 if deadline_s is None else deadline_s + 4), row
        victim = _WORKER.search(row["victim"])
        assert victim is not None
        # Of a link between two that are in a round, both ends report the other one.
        suspects = _WORKER.findall(row["noticed_as"].replace("draft rank 0", "drafting actor"))
        assert row["kind"] == "silent peer" or suspects == [victim[0]], row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_outlive_links_that_are_cut() -> None:
    words = ["--requests", "8", "--kills", "2", "--max-tokens", "240", "--gap-s", "0.1"]
    words += ["--kinds", "link", "--concurrency", "4", "--at-once", "0"]
    assert _chaos(*words, timeout_s=580)["kills"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forty_streams_and_every_kind_of_kill_in_two_pipelines() -> None:
    report = _chaos("--quick", "--pipelines", "2", "--seed", "1", timeout_s=880)
    assert report["requests"] == 40
    kinds = {row["kind"] for row in report["faults"]}
    assert kinds >= {"verify rank", "drafting actor"}
    assert any(fault_named(kind).is_slow for kind in kinds)
    assert report["recovery_p95_s"] is not None
