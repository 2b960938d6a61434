"""A full disk is named before a process dies of it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eesd_dist.errors import EngineError
from eesd_dist.workers.crash_report import require_room


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 20 MiB."""
    mount = ("mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(tmp_path))
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_without_room_for_a_process_is_named(disk: Path) -> None:
    require_room([disk])
    (disk / "log").write_bytes(bytes(10 * 2**20))
    with pytest.raises(EngineError) as failure:
        require_room([disk])
    assert str(failure.value).startswith(
        f"no space on the disk of {disk}: found 10.0 MiB free, expected at least 16 MiB"
    )


def test_a_disk_without_inodes_is_named(tmp_path: Path) -> None:
    def room(folder: Path) -> os.statvfs_result:
        stats = os.statvfs(folder)
        free_blocks = 2**30
        return os.statvfs_result((*stats[:3], free_blocks, free_blocks, 1000, 0, 0, *stats[8:]))

    with pytest.raises(EngineError, match="no free inode"):
        require_room([tmp_path], room=room)
