"""Texts of Ray's errors, in one line: many have several, and those of actors a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eesd_dist.errors import EesdError, EngineError

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
