"""Options of `eesd plan-fleet`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

from cluster.fleet.arrivals import Lengths
from cluster.fleet.setting import SPEED, FleetSetting
from eesd_dist.checks import require_positive
from eesd_dist.errors import ConfigError
from eesd_dist.routing.fleet.size import FleetTargets

_TARGETS = FleetTargets()
_SETTING = FleetSetting(targets=_TARGETS)
_LENGTHS = Lengths()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Simulates pipelines that follow a load.

    Prints times to first tokens, node hours and changes.

    Requests arrive at random, at a constant rate, in bursts or along a day. The number of pipelines
    is decided by the policy of `pipelines` in a service's configuration. A pipeline's speed is a
    measured cost model (the file of `speculation.cost_file`), or two figures. Nothing runs but the
    simulation. Exit status 1 when a request was lost: not over a day after the last arrival.
    """

    rate: Annotated[float, "requests per second (on a day: at noon)"] = 2.0
    load: Annotated[Literal["constant", "bursts", "day"], "shape of the load"] = "constant"
    hours: Annotated[float, "of arrivals"] = 2.0
    burst_factor: Annotated[float, "rate of a burst, in rates"] = 5.0
    burst_every_s: Annotated[float, "from burst to burst"] = 1800.0
    burst_s: Annotated[float, "length of a burst"] = 300.0
    trough: Annotated[float, "rate at midnight, as a share of noon's"] = 0.2
    prompt_tokens: Annotated[float, "mean length of prompts"] = _LENGTHS.prompt_tokens
    tokens: Annotated[float, "mean length of answers"] = _LENGTHS.tokens
    cost: Annotated[Path | None, "file of `speculation.cost_file`"] = None
    draft_length: Annotated[int, "tokens drafted in a round, with --cost"] = 4
    round_ms: Annotated[float, "round of one request, without --cost"] = round(
        1000.0 * (SPEED.fixed_s + SPEED.request_s), 3
    )
    request_ms: Annotated[float, "each further request, without --cost"] = 1000.0 * SPEED.request_s
    tokens_per_turn: Annotated[float, "tokens a request gains in a round"] = SPEED.tokens_per_turn
    max_running: Annotated[int, "requests that share rounds"] = SPEED.max_running
    min_count: Annotated[int, "pipelines that always run"] = _TARGETS.min_count
    max_count: Annotated[int, "most pipelines"] = 8
    target_live_requests: Annotated[float, "live requests aimed at for each pipeline"] = (
        _TARGETS.live_requests
    )
    target_first_token_s: Annotated[float | None, "first-token time aimed at"] = (
        _TARGETS.first_token_s
    )
    shrink_at: Annotated[float, "share of the targets at which one is given up"] = (
        _TARGETS.shrink_at
    )
    up_delay_s: Annotated[float, "how long too much load is watched"] = _TARGETS.up_delay_s
    down_delay_s: Annotated[float, "how long too little load is watched"] = _TARGETS.down_delay_s
    idle_delay_s: Annotated[float, "without a request before the last pipeline goes"] = (
        _TARGETS.idle_delay_s
    )
    birth_s: Annotated[float, "from asking for a node to the node"] = _SETTING.birth_s
    load_s: Annotated[float, "from the node to a pipeline that serves"] = _SETTING.load_s
    spot_hours: Annotated[float | None, "mean life of a node; without it nodes do not die"] = None
    seed: Annotated[int, "of arrivals, lengths and deaths"] = 0
    json: Annotated[bool, "one JSON object only"] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not isfinite(value):
                raise ConfigError(f"{field.name} is {value}: expected a number")
        require_positive(
            self, "rate", "hours", "tokens_per_turn", "max_running", "prompt_tokens", "tokens"
        )
        require_positive(self, "burst_factor", "burst_every_s", "burst_s", "spot_hours", "round_ms")
        if not 0.0 <= self.trough <= 1.0:
            raise ConfigError(f"trough is {self.trough:g}: expected a share, 0 to 1")
        if not 0.0 <= self.request_ms <= self.round_ms:
            raise ConfigError(
                f"request_ms is {self.request_ms:g}: expected 0 to round_ms, {self.round_ms:g}"
            )
        if self.draft_length < 0:
            raise ConfigError(f"draft_length is {self.draft_length}: expected 0 or more")
        FleetSetting(targets=self.targets, birth_s=self.birth_s, load_s=self.load_s)

    @property
    def targets(self) -> FleetTargets:
        """Targets of the policy. Raises ConfigError for targets that contradict each other."""
        return FleetTargets(
            min_count=self.min_count,
            max_count=self.max_count,
            live_requests=self.target_live_requests,
            first_token_s=self.target_first_token_s,
            shrink_at=self.shrink_at,
            up_delay_s=self.up_delay_s,
            down_delay_s=self.down_delay_s,
            idle_delay_s=self.idle_delay_s,
        )
