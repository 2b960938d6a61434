"""What grows in a service of its own: for two minutes, and for twenty (`make test-endurance`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.endurance.processes import ROLES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_reads_every_role_and_finds_no_page_in_use(tmp_path: Path) -> None:
    file = tmp_path / "readings.jsonl"
    words = ["--minutes", "2", "--json", "--requests", "6", "--max-tokens", "60", "--gap-s", "10"]
    words += ["--settle-s", "20", "--readings", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.endurance", *words],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    # A service that is two minutes old still warms up: memory may grow, nothing else may be wrong.
    assert [complaint for complaint in report["complaints"] if " grows: " not in complaint] == []
    assert done.returncode == bool(report["complaints"])
    assert {figure["name"] for figure in report["figures"]} >= {
        *(f"memory of {role}" for role in set(ROLES) - {"verify rank", "drafting actor"}),
        *("shared memory", "actors", "processes", "pages in use, idle"),
    }
    assert report["idle_pages_in_use"]
    assert not any(report["idle_pages_in_use"])
    assert report["wrong"] == {}
    assert set(report["requests"]) == {"stream", "left", "choices", "bad"}
    assert sum(report["faults"].values()) >= 1
    readings = [json.loads(line) for line in file.read_text().splitlines()]
    roles = {process["role"] for reading in readings for process in reading["processes"]}
    assert roles >= set(ROLES)
    assert report["provenance"]["seed"] == 0


@pytest.mark.endurance
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_nothing_grows_in_twenty_minutes() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.endurance"], check=False)
    assert done.returncode == 0
