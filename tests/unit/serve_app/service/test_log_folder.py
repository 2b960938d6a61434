"""The logs of a start are private, and the logs of old starts go."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from serve_app.service.log_folder import new_log_folder


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
