"""What a user reads when Ray does not start, in one line."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RayTaskError

from cluster.ray_compat import HAPROXY
from eesd_dist.errors import ConfigError, EngineError
from serve_app.service.local_ray import (
    _LONGEST_WITH_HAPROXY,
    _short_folder,
    _start,
    new_log_folder,
    require_ray_room,
    watched_folder,
)
from serve_app.service.ray_failures import ray_errors_in_a_line, reason_of
from serve_app.service.watchdog import haproxy_folder


def test_a_ray_that_does_not_start_is_a_line_with_the_place_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "private" / "r"
    folder.parent.mkdir()
    folder.write_text("no folder")
    with pytest.raises(EngineError) as failure:
        _start(folder, num_cpus=1, shows_logs=False)
    assert "Ray could not be started: " in str(failure.value)
    assert f"(its files are in {tmp_path}, with " in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with (
        pytest.raises(ConfigError, match=r"no folder for Ray's files in /proc: .* TMPDIR"),
        watched_folder("/proc", logs=None),
    ):
        pass


def test_a_folder_without_room_is_named_before_ray_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"^/proc has 0 MiB free, .* name another folder in TMPDIR"
    ):
        require_ray_room(Path("/proc"))  # which has no blocks at all


def test_without_a_folder_for_temporary_files_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(ConfigError, match="name a folder of yours in TMPDIR"):
        _short_folder()


def test_the_sockets_of_a_haproxy_have_names_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/a/" + "b" * 20)
    assert _short_folder() == tempfile.tempdir
    monkeypatch.setenv(HAPROXY, "1")
    assert _short_folder() == "/tmp"
    monkeypatch.setattr(tempfile, "tempdir", "/" + "b" * (_LONGEST_WITH_HAPROXY - 1))
    folder = Path(_short_folder()) / "eesd-12345678"
    node = "e" * 56
    # HAProxy gives a socket another name until it has taken over its listeners.
    assert len(str(haproxy_folder(folder) / node / "admin.sock.4194304.tmp")) <= 107


def _failed_task(cause: Exception) -> RayTaskError:
    trace = f"ray::task() (pid=1)\nTraceback (most recent call last):\n  ...\nValueError: {cause}"
    return RayTaskError("task", trace, cause)


def test_several_lines_become_one() -> None:
    error = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 1\n  Python: 2")
    assert reason_of(error) == "Version mismatch: The cluster was started with: Ray: 1 Python: 2"
    assert reason_of(_failed_task(ValueError("odd"))) == "odd"
    assert reason_of(RuntimeError("Traceback (most recent call last):\n  x\nKeyError: 3")) == (
        "KeyError: 3"
    )
    assert reason_of(TimeoutError()) == "TimeoutError"
    assert len(reason_of(RuntimeError("word " * 1000))) < 420


def test_an_error_of_ray_becomes_ours() -> None:
    with pytest.raises(EngineError, match=r"^Ray: The actor experienced"), ray_errors_in_a_line():
        raise RayActorError
    ours = ConfigError("no such head")
    with pytest.raises(ConfigError, match=r"^no such head"), ray_errors_in_a_line():
        raise _failed_task(ours)


def test_a_start_has_a_private_folder_in_the_users_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = new_log_folder(None, port=8000)
    assert folder.parent == tmp_path / "eesd" / "logs"
    assert "-port8000-" in folder.name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_log_folder(None, port=1).parent == tmp_path / ".local" / "state" / "eesd" / "logs"


def test_the_last_ten_are_kept_and_those_of_running_services(tmp_path: Path) -> None:
    session = tmp_path / "session"
    session.mkdir()
    for day in range(10, 25):
        (tmp_path / f"logs/202601{day}-000000-port8000-1").mkdir(parents=True)
    (tmp_path / "logs" / "20260110-000000-port8000-1" / "ray").symlink_to(session)
    (tmp_path / "logs" / "20260111-000000-port8000-1" / "ray").symlink_to(tmp_path / "gone")
    (tmp_path / "logs" / "of-the-user").mkdir()
    new = new_log_folder(tmp_path / "logs", port=8000)
    left = {folder.name for folder in (tmp_path / "logs").iterdir()}
    days = [10, *range(16, 25)]
    names = {f"202601{day}-000000-port8000-1" for day in days}
    assert left == {new.name, "of-the-user"} | names


def test_a_folder_that_cannot_be_made_is_named_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"/file/.*--log-folder"):
        new_log_folder(tmp_path / "file", port=8000)


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_a_user_without_a_home_folder_to_write_has_a_private_one_among_the_temporary_folders(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: home or path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = new_log_folder(None, port=8000)
    private = tmp_path / f"eesd-{os.getuid()}"
    assert folder.parent == private / "state" / "logs"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o755)
    with pytest.raises(ConfigError, match="only you can read"):
        new_log_folder(None, port=8000)
