"""Options of `eesd plan-fleet`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from eesd_dist.checks import require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Simulates pipelines that follow a load.

    Prints times to first tokens, node hours and changes.

    Requests arrive at random, at a constant rate, in bursts or along a day. The number of pipelines
    is decided by the policy of `pipelines` in a service's configuration. A pipeline's speed is a
    measured cost model (the file of `speculation.cost_file`), or two figures. Nothing runs but the
    simulation. Exit status 1 when a request was lost.
    """

    rate: Annotated[float, "requests per second (on a day: at noon)"] = 2.0
    load: Annotated[Literal["constant", "bursts", "day"], "shape of the load"] = "constant"
    hours: Annotated[float, "of arrivals"] = 2.0
    burst_factor: Annotated[float, "rate of a burst, in rates"] = 5.0
    burst_every_s: Annotated[float, "from burst to burst"] = 1800.0
    burst_s: Annotated[float, "length of a burst"] = 300.0
    trough: Annotated[float, "rate at midnight, as a share of noon's"] = 0.2
    prompt_tokens: Annotated[float, "mean length of prompts"] = 500.0
    tokens: Annotated[float, "mean length of answers"] = 200.0
    cost: Annotated[Path | None, "JSON file of a measured cost model"] = None
    draft_length: Annotated[int, "tokens drafted in a round, with --cost"] = 4
    round_ms: Annotated[float, "round of one request, without --cost"] = 30.0
    request_ms: Annotated[float, "each further request, without --cost"] = 1.0
    tokens_per_turn: Annotated[float, "tokens a request gains in a round"] = 2.5
    max_running: Annotated[int, "requests that share rounds"] = 32
    min_count: Annotated[int, "pipelines that always run"] = 1
    max_count: Annotated[int, "most pipelines"] = 8
    target_live_requests: Annotated[float, "live requests aimed at for each pipeline"] = 16.0
    target_first_token_s: Annotated[float | None, "first-token time aimed at"] = None
    shrink_at: Annotated[float, "share of the targets at which one is given up"] = 0.7
    up_delay_s: Annotated[float, "how long too much load is watched"] = 10.0
    down_delay_s: Annotated[float, "how long too little load is watched"] = 120.0
    idle_delay_s: Annotated[float, "without a request before the last pipeline goes"] = 600.0
    birth_s: Annotated[float, "from asking for a node to the node"] = 120.0
    load_s: Annotated[float, "from the node to a pipeline that serves"] = 180.0
    spot_hours: Annotated[float | None, "mean life of a node; without it nodes do not die"] = None
    seed: Annotated[int, "of arrivals, lengths and deaths"] = 0
    json: Annotated[bool, "one JSON object only"] = False

    def __post_init__(self) -> None:
        require_positive(
            self, "rate", "hours", "tokens_per_turn", "max_running", "prompt_tokens", "tokens"
        )
        require_positive(self, "burst_factor", "burst_every_s", "burst_s", "spot_hours")
