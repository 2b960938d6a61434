"""What a request of `eesd distill` refuses before it reads anything, and what must be installed."""

from collections.abc import Sequence
from importlib.util import find_spec

from eesd_dist.errors import ConfigError

_EXTRA = ("deepspeed", "matplotlib", "pandas", "pyarrow", "tensorboard")


def require_distill_extra() -> None:
    """Raises ConfigError naming all that is missing, rather than hours later the first of it."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"distillation needs {', '.join(missing)}, not found here: pip install "
            "'eesd-dist[distill]'"
        )


def require_positive(**values: float | None) -> None:
    """None is what was not asked for."""
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value}: it must be above 0")


def require_temperatures(temperatures: Sequence[float]) -> None:
    if not temperatures or min(temperatures) < 0.0:
        raise ConfigError(f"temperatures are {list(temperatures)}: expected numbers from 0 on")
