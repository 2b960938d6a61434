"""`eesd bench chaos` on a service of its own: processes die, and no stream is the worse for it."""

import json
import subprocess
import sys
from typing import Any

import pytest


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


@pytest.mark.timeout(600)
def test_streams_outlive_the_processes_under_them() -> None:
    kinds = ["--kinds", "verify rank", "drafting actor"]
    # Long streams and short gaps: every kill finds some under way.
    words = ["--requests", "8", "--kills", "2", "--max-tokens", "240", "--gap-s", "0.1", *kinds]
    report = _chaos(*words, "--concurrency", "4", "--at-once", "0", timeout_s=580)
    assert report["requests"] == 8
    assert report["kills"] == 2
    assert report["interruptions"] >= 2
    assert 0 < report["recovery_p50_s"] <= report["recovery_p95_s"]
    assert report["provenance"]["seed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_outlive_links_that_are_cut_and_loops_that_are_stopped() -> None:
    kinds = ["--kinds", "link", "loop"]
    words = ["--requests", "8", "--kills", "3", "--max-tokens", "240", "--gap-s", "0.1", *kinds]
    report = _chaos(*words, "--concurrency", "4", "--at-once", "0", timeout_s=580)
    assert report["kills"] >= 2
    assert {row["kind"] for row in report["faults"]} == {"link", "loop"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forty_streams_and_every_kind_of_kill_in_two_pipelines() -> None:
    report = _chaos("--quick", "--pipelines", "2", "--seed", "1", timeout_s=880)
    assert report["requests"] == 40
    assert {row["kind"] for row in report["faults"]} >= {"verify rank", "drafting actor", "hang"}
    assert report["recovery_p95_s"] is not None
