"""Errors of a disk, or another file system, as errors of this project."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from eesd_dist.errors import ConfigError


@contextmanager
def writing(name: object) -> Iterator[None]:
    """Raises ConfigError in place of the errors of writing `name`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"{name}: cannot be written ({reason}); make room and start again, finished rows are "
            "kept"
        ) from error
