"""Checks a model in a process of its own, while the caller imports what it needs to start.

It imports torch, which a process that only starts others can do without.
"""

import atexit
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from eesd_dist.config import EngineConfig
from eesd_dist.errors import ConfigError, EesdError

logger = logging.getLogger(__name__)

_REFUSED = 3
"""Exit status where the error is the last line."""


_POLL_S = 0.05


def _never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class ModelCheck:
    """A check that is under way."""

    def __init__(self, config: EngineConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, config.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def finish(self, *, stopped: Callable[[float], bool] = _never) -> None:
        """Waits for the result, or until `stopped`, which waits for so many seconds, returns True.
        Raises ConfigError for a model that would not load."""
        while self._process.poll() is None:
            if stopped(_POLL_S):
                return
        assert self._process.stdout is not None, "it is a pipe"
        output = self._process.stdout.read()
        if self._process.returncode == _REFUSED:
            raise ConfigError(output.strip().rpartition("\n")[2])
        if self._process.returncode:  # the workers will say why
            logger.warning("model not checked: status=%d", self._process.returncode)


def main() -> int:
    """Checks the configuration in the argument, which is JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends this
    from eesd_dist.engine.build import check_model

    try:
        check_model(EngineConfig.model_validate_json(sys.argv[1]))
    except EesdError as error:
        sys.stdout.write(" ".join(str(error).split()))
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
