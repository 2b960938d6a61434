"""Groups of a user without privileges withstand the same intruders."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ordinary_user import as_ordinary_user, ordinary_environment

pytestmark = pytest.mark.dist

_INTRUDERS = Path(__file__).with_name("test_intruders.py")


def test_an_ordinary_users_groups_connect_and_compute_the_same_during_a_scan() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_INTRUDERS))
    run = subprocess.run(
        as_ordinary_user(command),
        env=ordinary_environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=_INTRUDERS.parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
