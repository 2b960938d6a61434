"""Errors of a disk, or another file system, as errors of this project."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from eesd_dist.errors import ConfigError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def writing(name: object) -> Iterator[None]:
    """Raises ConfigError in place of the errors of writing `name`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        is_full = getattr(error, "errno", None) in _FULL
        advice = "make room" if is_full else "name another output, or mend that"
        raise ConfigError(
            f"{name}: cannot be written ({reason_of(error)}); {advice} and start again, finished "
            "rows are kept"
        ) from error


def reason_of(error: Exception) -> str:
    """Returns the reason of a file system's error in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
