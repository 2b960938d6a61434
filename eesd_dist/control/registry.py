"""Registry of controllers by name. A new one is a file and one line in `CONTROLLERS`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from eesd_dist.control import thompson
from eesd_dist.control.base import BatchController, ControlSetup
from eesd_dist.control.fixed import fixed
from eesd_dist.control.goodput import Goodput
from eesd_dist.control.ngram import NGram
from eesd_dist.control.one_by_one import ControllerBuilder, OneByOne
from eesd_dist.control.smartspec import SmartSpec
from eesd_dist.errors import ConfigError
from eesd_dist.removed import replacement_of


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Entry of a controller that decides for each request alone."""

    build_controller: ControllerBuilder

    def build(self, setup: ControlSetup) -> BatchController:
        return OneByOne(self.build_controller, setup)


@dataclass(frozen=True, slots=True)
class BatchWide:
    """Entry of a controller that decides over all requests that name it."""

    build: Callable[[ControlSetup], BatchController]


Entry = PerRequest | BatchWide

CONTROLLERS: Mapping[str, Entry] = {
    "fixed": PerRequest(fixed),
    "beta": PerRequest(thompson.beta),
    "calibration": PerRequest(thompson.calibration),
    "goodput": BatchWide(Goodput),
    "smartspec": BatchWide(SmartSpec),
    "ngram": BatchWide(NGram),
}
CONTROLLER_NAMES = tuple(CONTROLLERS)


def entry_of(name: str) -> Entry:
    """Returns a controller's entry. Raises ConfigError for a name that is not registered."""
    entry = CONTROLLERS.get(name)
    if entry is None:
        text = f"speculation.controller is {name!r}, expected one of {', '.join(CONTROLLER_NAMES)}"
        replacement = replacement_of(f"speculation.controller: {name}")
        raise ConfigError(text if replacement is None else f"{text}; {replacement}")
    return entry
