"""Ray's errors in one line, without their tracebacks, and a Ray that ends under a service.

Without its raylet a node's workers exit within seconds; without the head's GCS every process of Ray
exits after a minute (`RAY_gcs_rpc_server_reconnect_timeout_s`), unless it returns. Calls of a
driver then wait for ever, or end its process with an error of Ray's own: so a service asks first.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.ray_compat import dead_ray_processes
from eesd_dist.errors import EesdError, EngineError
from serve_app.service.connection_file import is_silent

_MAX_CHARS = 400
_TRACEBACK = "Traceback (most recent call last)"


def reason_of(error: BaseException) -> str:
    """Returns what the error says; of a traceback, the exception at its end."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, BaseException) else error).strip()
    if _TRACEBACK in text:
        text = text.splitlines()[-1]
    words = " ".join(text.split()) or type(error).__name__
    return words if len(words) <= _MAX_CHARS else f"{words[:_MAX_CHARS]} ..."


@contextmanager
def ray_errors_in_a_line() -> Iterator[None]:
    """Within the block an error of Ray becomes an EngineError, or the project's own error that
    caused it."""
    try:
        yield
    except (RayError, RayServeException) as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EesdError):
            raise cause from error
        raise EngineError(f"Ray: {reason_of(error)}") from error


_PATIENCE_S = 45.0
"""Less than the minute after which Ray ends this process."""


class RayWatch:
    """The Ray that this process is connected to, looked at from time to time."""

    def __init__(
        self,
        address: str,
        *,
        say: Callable[[str], None],
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address` is the GCS of the head, `host:port`."""
        self._address = address
        self._say = say
        self._patience_s = min(patience_s, _PATIENCE_S)
        self._clock = clock
        self._silent_since_s: float | None = None
        """None while the head answers."""
        self.answers = True
        """True if Ray could be called at the last look."""

    def look(self) -> bool:
        """Returns whether Ray can be called. Raises EngineError when it has ended: at once for
        the raylet of a local Ray, and `patience_s` after the first look at a head that is silent.
        """
        self.answers = False
        if "raylet" in dead_ray_processes():
            raise EngineError(
                "the raylet of the local Ray has died, and all workers die with it: the service "
                "has ended; its logs are kept, start it again"
            )
        if not is_silent(self._address):
            if self._silent_since_s is not None:
                self._say(f"Ray's head at {self._address} answers again")
            self._silent_since_s = None
            self.answers = True
            return True
        if self._silent_since_s is None:
            self._silent_since_s = self._clock()
            self._say(
                f"Ray's head (GCS) at {self._address} does not answer: live streams go on; if it "
                f"does not return within {self._patience_s:.0f} s, this process ends"
            )
        elif self._clock() - self._silent_since_s > self._patience_s:
            raise EngineError(
                f"Ray's head (GCS) at {self._address} has not answered for {self._patience_s:.0f} "
                "s: without GCS fault tolerance the service has ended (docs/operations.md); start "
                "it again when the head runs"
            )
        return False
