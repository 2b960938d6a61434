"""What a user reads when Ray does not start, in one line."""

import tempfile
from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RayTaskError

from eesd_dist.errors import ConfigError, EngineError
from serve_app.service.local_ray import _short_folder, _start, require_ray_room, watched_folder
from serve_app.service.ray_errors import ray_errors_in_a_line, reason_of


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
