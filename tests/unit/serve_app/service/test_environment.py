"""The environment that is set before Ray is imported has the intended effect on Ray."""

import subprocess
import sys

import pytest

_DEATH = """
import os
os.environ.pop("RAY_DEDUP_LOGS_SKIP_REGEX", None)
from serve_app.service.environment import prepare_for_cluster
prepare_for_cluster(shows_logs={shows_logs})
from ray._private.worker import print_to_stdstream  # what its drivers call when a process died
print_to_stdstream(
    {{"lines": ["A worker died"], "pid": "raylet", "is_err": False}}, ignore_prefix=False
)
"""


@pytest.mark.parametrize("shows_logs", [False, True])
def test_stdout_is_ours_unless_logs_are_wanted(shows_logs: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DEATH.format(shows_logs=shows_logs)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert ("A worker died" in done.stdout) is shows_logs
    assert shows_logs or done.stdout == ""
