"""Settings of all tests: one thread per process, no trace export, no running Ray, no network."""

import os
import tempfile
from typing import Any

import pytest
from hypothesis import settings

# Set before torch or Ray is imported, and inherited by every process that a test starts. With two
# threads per process on two busy cores, threads wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise Ray would write a token to the home directory, and its commands would choose different
# modes.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Otherwise Ray would report killed processes on stdout, which tests read.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
# Without a GPU its kernels are interpreted; Triton reads this when it is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Every test run repeats the self-checks, once.
_cache = tempfile.TemporaryDirectory(prefix="self-checks-")
os.environ.setdefault("EESD_CACHE_DIR", _cache.name)
# The logs of services under test are no user's.
_state = tempfile.TemporaryDirectory(prefix="eesd-test-state-")
os.environ["XDG_STATE_HOME"] = _state.name
# Tests must not use a collector or cluster of the caller.
for name in [variable for variable in os.environ if variable.startswith("OTEL_")] + ["RAY_ADDRESS"]:
    os.environ.pop(name, None)
# No test needs files from a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline per example: on a busy machine examples are slow. `make test` has the same examples
# each time, `make test-slow` others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=300)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support import interpreted_dot

        interpreted_dot.install()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.scheduling import FoldersAndFiles

    return FoldersAndFiles(config, log) if config.getvalue("dist") == "loadfile" else None
