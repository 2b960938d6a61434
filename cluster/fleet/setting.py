"""Inputs of a simulation of a fleet. Imports nothing heavy: the options have defaults here."""

from dataclasses import dataclass
from math import isfinite

from eesd_dist.control.cost import CostModel
from eesd_dist.errors import ConfigError
from eesd_dist.routing.fleet.size import FleetTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Cost of a pipeline's rounds."""

    fixed_s: float = 0.029
    request_s: float = 0.001
    tokens_per_turn: float = 2.5
    prompt_share: float = 0.02
    max_running: int = 32

    def __post_init__(self) -> None:
        if not (self.fixed_s + self.request_s > 0.0 and self.tokens_per_turn > 0.0):
            raise ConfigError(
                f"found rounds of {self.fixed_s:g} + {self.request_s:g} s a request and "
                f"{self.tokens_per_turn:g} tokens a turn: expected positive figures"
            )

    @property
    def cost(self) -> CostModel:
        """The rounds, as an engine measures them."""
        single_s = self.fixed_s + self.request_s
        return CostModel(draft_step_s=0.0, verify_s=(single_s,), request_s=self.request_s)

    def tokens_per_s(self, num_running: int) -> float:
        """Returns the tokens per second of all running requests together."""
        if num_running == 0:
            return 0.0
        return num_running * self.tokens_per_turn / (self.fixed_s + num_running * self.request_s)


SPEED = Speed()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetting:
    """Settings of a simulation, apart from the load."""

    targets: FleetTargets
    speed: Speed = SPEED
    initial: int = 1
    """Pipelines that serve at the beginning."""
    birth_s: float = 120.0
    """Seconds from asking for a node to the node."""
    load_s: float = 180.0
    """Seconds from the node to a pipeline that serves."""
    node_idle_s: float = 60.0
    """Seconds from the end of a pipeline to the end of its node."""
    mean_life_s: float | None = None
    """Mean life of a spot node; None: nodes do not die."""
    max_waiting: int = 256
    """Requests that may wait while no pipeline serves; the next one is refused."""
    look_s: float = 1.0
    patience_s: float = 86_400.0
    """Seconds after the last arrival; requests that are not over by then are lost."""

    def __post_init__(self) -> None:
        for name in ("birth_s", "load_s", "node_idle_s", "patience_s"):
            seconds = getattr(self, name)
            if not (isfinite(seconds) and seconds >= 0.0):
                raise ConfigError(f"{name} is {seconds:g}: expected a time, 0 or more")
