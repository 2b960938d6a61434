"""Checks of options and of optional packages, made before a command reads anything."""

from collections.abc import Sequence
from importlib.util import find_spec

from eesd_dist.errors import ConfigError


def require_positive(request: object, *names: str) -> None:
    """Raises ConfigError for the first of these fields that is 0 or less; None is allowed."""
    for name in names:
        value = getattr(request, name)
        if value is not None and not value > 0:  # refuses nan too
            raise ConfigError(f"{name} is {value}: it must be above 0")


def require_temperatures(temperatures: Sequence[float]) -> None:
    """Raises ConfigError for an empty list or a temperature below 0."""
    if not temperatures or min(temperatures) < 0.0:
        raise ConfigError(f"temperatures are {list(temperatures)}: expected numbers from 0 on")


def require_extra(extra: str, *packages: str, what: str) -> None:
    """Raises ConfigError that names all packages of an extra that are missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {', '.join(missing)}, not found here: pip install 'eesd-dist[{extra}]'"
        )
