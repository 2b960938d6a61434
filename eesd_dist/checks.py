"""Checks of numeric options, made before a distillation step reads anything."""

from collections.abc import Sequence

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
