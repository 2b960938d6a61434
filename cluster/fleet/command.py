"""`eesd plan-fleet`: simulates a fleet under a load, and prints what came of it."""

import json
from random import Random

from typer import echo

from cluster.fleet.arrivals import Lengths, Rate, arrivals, bursts, constant, day
from cluster.fleet.options import FleetOptions
from cluster.fleet.outcome import Outcome
from cluster.fleet.setting import FleetSetting, Speed
from eesd_dist.checks import require_extra
from eesd_dist.control.cost import CostModel


def main(options: FleetOptions) -> int:
    outcome = simulate(options)
    summary = outcome.summary()
    if options.json:
        changes = [[round(c.at_s, 1), c.was, c.target] for c in outcome.changes]
        echo(json.dumps({"summary": summary, "changes": changes}))
    else:
        for line in _lines(outcome):
            echo(line)
    return int(outcome.num_lost > 0)


def simulate(options: FleetOptions) -> Outcome:
    """Raises ConfigError for options that contradict each other, and where simpy is missing."""
    require_extra("fleet", "simpy", what="the simulation of a fleet")
    from cluster.fleet.simulation import FleetSimulation

    rate, highest = _rate(options)
    requests = arrivals(
        rate,
        highest=highest,
        lasting_s=3600.0 * options.hours,
        lengths=Lengths(prompt_tokens=options.prompt_tokens, tokens=options.tokens),
        rng=Random(options.seed),
    )
    setting = FleetSetting(
        targets=options.targets,
        speed=_speed(options),
        initial=options.min_count,
        birth_s=options.birth_s,
        load_s=options.load_s,
        mean_life_s=None if options.spot_hours is None else 3600.0 * options.spot_hours,
    )
    return FleetSimulation(setting, requests, seed=options.seed).run()


def speed_of(
    cost: CostModel, *, draft_length: int, tokens_per_turn: float, max_running: int
) -> Speed:
    """Returns a line through the rounds of one request and of a full batch."""
    single_s = cost.batch_seconds([draft_length])
    full_s = cost.batch_seconds([draft_length] * max_running)
    request_s = max(full_s - single_s, 0.0) / max(max_running - 1, 1)
    return Speed(
        fixed_s=max(single_s - request_s, 0.0),
        request_s=request_s,
        tokens_per_turn=tokens_per_turn,
        max_running=max_running,
    )


def _speed(options: FleetOptions) -> Speed:
    if options.cost is not None:
        return speed_of(
            CostModel.load(options.cost),
            draft_length=options.draft_length,
            tokens_per_turn=options.tokens_per_turn,
            max_running=options.max_running,
        )
    return Speed(
        fixed_s=(options.round_ms - options.request_ms) / 1000.0,
        request_s=options.request_ms / 1000.0,
        tokens_per_turn=options.tokens_per_turn,
        max_running=options.max_running,
    )


def _rate(options: FleetOptions) -> tuple[Rate, float]:
    """Returns the rate, and its highest value."""
    rate = options.rate
    match options.load:
        case "constant":
            return constant(rate), rate
        case "bursts":
            factor = options.burst_factor
            shape = bursts(
                rate, factor=factor, period_s=options.burst_every_s, lasting_s=options.burst_s
            )
            return shape, rate * max(factor, 1.0)
        case "day":
            return day(rate, trough=rate * options.trough), rate


def _lines(outcome: Outcome) -> list[str]:
    summary = outcome.summary()
    return [
        f"requests     {summary['requests']}, refused {summary['refused']}, "
        f"lost {summary['lost']}, moved {summary['moved']}",
        f"first token  p50 {summary['first_token_p50_s']:.2f} s, p90 "
        f"{summary['first_token_p90_s']:.2f} s, p99 {summary['first_token_p99_s']:.2f} s",
        f"nodes        {summary['node_hours']:.2f} node hours in {summary['hours']:.2f} h, "
        f"{summary['deaths']} deaths",
        f"changes      {summary['changes']}, of these {summary['flaps']} taken back "
        "within 5 minutes",
    ]
