"""The environment that is set before Ray is imported has the intended effect on Ray."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.ray_compat import HAPROXY
from serve_app.service.environment import _PORTS, prepare_for_haproxy

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


_HAPROXY = """
import os, sys
from pathlib import Path
from serve_app.service.environment import prepare_for_haproxy
prepare_for_haproxy(Path(sys.argv[1]), port=8000)
from ray.serve._private import constants
for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE",
             "METRICS_SOCKET_PATH", "STATS_PORT", "METRICS_PORT", "TIMEOUT_CLIENT_S"):
    print(getattr(constants, "RAY_SERVE_HAPROXY_" + name))
print(constants.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT)
print(constants.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S)
"""


def _haproxy(folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Returns where Serve's HAProxy of a service has its files, its ports and its limits."""
    done = subprocess.run(
        [sys.executable, "-c", _HAPROXY, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return done.stdout.split()


def test_a_haproxy_has_files_and_ports_of_its_own(tmp_path: Path) -> None:
    shown = _haproxy(tmp_path, {HAPROXY: "1"})
    assert all(Path(file).is_relative_to(tmp_path) for file in shown[:5])
    assert len({*shown[5:7], shown[8], "8404", "9101", "8500"}) == 6
    assert (shown[7], shown[9]) == ("60", "2.0")


def test_what_the_environment_says_of_a_haproxy_is_kept(tmp_path: Path) -> None:
    chosen = {"STATS_PORT": "8600", "METRICS_PORT": "8601", "TIMEOUT_CLIENT_S": "7"}
    environment = {f"RAY_SERVE_HAPROXY_{name}": value for name, value in chosen.items()}
    environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = "8602"
    environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "30"
    shown = _haproxy(tmp_path, {HAPROXY: "1", **environment})
    assert shown[5:] == ["8600", "8601", "7", "8602", "30.0"]


def test_another_ray_of_the_process_has_other_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, HAPROXY: "1"})
    ports: list[set[str]] = []
    for name in ("first", "second"):
        prepare_for_haproxy(tmp_path / name, port=8000)
        ports.append({os.environ[variable] for variable in _PORTS})
    assert len(ports[0] | ports[1]) == 2 * len(_PORTS)
    assert Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).is_relative_to(tmp_path / "second")


def test_without_haproxy_nothing_is_set(tmp_path: Path) -> None:
    shown = _haproxy(tmp_path, {HAPROXY: "0"})
    assert not any(Path(file).is_relative_to(tmp_path) for file in shown[:5])
    assert shown[5:] == ["8404", "9101", "3600", "8500", "30.0"]
