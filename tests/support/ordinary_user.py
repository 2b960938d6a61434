"""Commands run as a user with no entry in the table of users, no HOME and no privileges."""

import os
import shutil
from collections.abc import Sequence

import pytest

UID = 1000650
_READS_ALL = "+dac_read_search"
"""Reads the interpreter and the sources where their folders are another user's alone; opens nothing
for writing."""


def as_ordinary_user(command: Sequence[str]) -> list[str]:
    """Returns the command for this user. Skips the test where root cannot become another user; a
    user that is none already is taken as it is."""
    if os.getuid() != 0:
        return list(command)
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv of util-linux")
    reads = (f"--inh-caps={_READS_ALL}", f"--ambient-caps={_READS_ALL}")
    ids = (f"--reuid={UID}", f"--regid={UID}", "--clear-groups")
    return ["setpriv", *ids, *reads, *command]


def ordinary_environment() -> dict[str, str]:
    """Returns this process's environment without its user's name, HOME and folders."""
    folders = {"XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME", "EESD_CACHE_DIR"}
    user = {"HOME", "USER", "LOGNAME", *folders}
    return {key: value for key, value in os.environ.items() if key not in user}
