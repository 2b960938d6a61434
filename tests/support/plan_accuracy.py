"""Compares the planner's forecast with measured rounds of the same machine.

python -m tests.support.plan_accuracy [options]
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cluster.link_figures import CollectiveFigures, write_links
from cluster.planning.checkpoint import head_of_costs, read_shape
from cluster.planning.fitting import fit
from cluster.planning.forecast import PipelineForecast
from cluster.planning.machine import Machine
from cluster.planning.network import Network
from cluster.planning.shapes import Load, ModelShape, Split, on_cpu
from cluster.planning.stage_times import StageTimes
from eesd_dist.bench.costs.form import RoundCost, StageCosts, write_costs
from eesd_dist.bench.costs.measure import (
    RoundSetting,
    engine_config,
    measure_rounds,
    round_costs,
    stage_costs,
    warm_up,
)
from eesd_dist.bench.costs.pipeline import running_pipeline
from eesd_dist.bench.costs.rounds import RoundTimes
from eesd_dist.bench.options import SHIPPED_PROMPTS
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.command_line import run_command
from eesd_dist.text.prompts import Prompt, load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from tests.support.rank_sums import Times, measure_sums

_SUM_ROWS = (1, 4, 16, 64, 144)
_WORK_S = 60e-6
"""Between two sums, as half a layer of the bundled model."""


_VERIFY_TP = 2
_BATCHES, _LENGTHS = (1, 4, 8, 16), (0, 2, 4, 8)
_NUM_PROMPTS, _MAX_TOKENS = 16, 64
_LIMIT = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The planner's forecast against measured rounds.

    Measures costs with one verify rank at batches 1 and 8, and sums between two processes; predicts
    other batches and two verify ranks; measures these too. The pipelines take turns, so that a
    slower machine affects all of them; one thread a rank. On a shared machine run it as `chrt -r 5
    python -m tests.support.plan_accuracy`, or other processes delay the sums. Exit status 1 if a
    round time or a rate is off by more than 15 %.
    """

    model: Annotated[Path, "folder of the target model (the bundled one)"] = BUNDLED_MODEL
    repeats: Annotated[int, "runs of every setting"] = 3
    json: Annotated[bool, "print only the last line, one JSON object"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One setting, predicted and measured."""

    setting: RoundSetting
    predicted_s: float
    measured_s: float
    predicted_rate: float
    """Tokens per second of all requests; each from its own round time."""
    measured_rate: float

    @property
    def round_error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def rate_error(self) -> float:
        return self.predicted_rate / self.measured_rate - 1.0

    @property
    def worst(self) -> float:
        return max(abs(self.round_error), abs(self.rate_error))

    def as_json(self) -> dict[str, float]:
        return {
            "verify_tp": self.setting.verify_tp,
            "requests": self.setting.num_requests,
            "drafted": self.setting.num_draft_tokens,
            "predicted_round_ms": round(self.predicted_s * 1e3, 3),
            "measured_round_ms": round(self.measured_s * 1e3, 3),
            "round_error": round(self.round_error, 4),
            "predicted_tokens_per_s": round(self.predicted_rate, 1),
            "measured_tokens_per_s": round(self.measured_rate, 1),
            "rate_error": round(self.rate_error, 4),
        }


def fitted_machine(
    shape: ModelShape, costs: StageCosts, links: Sequence[CollectiveFigures]
) -> Machine:
    """Returns the machine as `eesd plan --costs --links` has it."""
    return fit(Machine(network=Network(measured=tuple(links))), shape, costs)


def compare(
    shape: ModelShape,
    costs: StageCosts,
    links: Sequence[CollectiveFigures],
    measured: Mapping[int, Sequence[RoundCost]],
) -> list[Comparison]:
    """Predicts each measured round from the costs. `measured`: rounds by number of verify ranks."""
    machine = fitted_machine(shape, costs, links)
    return [
        _compared(shape, costs, machine, verify_tp, cost)
        for verify_tp, rounds in measured.items()
        for cost in rounds
    ]


def _compared(
    shape: ModelShape, costs: StageCosts, machine: Machine, verify_tp: int, cost: RoundCost
) -> Comparison:
    split = Split(
        exit_layer=costs.model.exit_layer,
        verify_tensor_parallel_size=verify_tp,
        draft_vocab_size=costs.model.draft_vocab_size,
    )
    load = Load(
        num_requests=cost.num_requests,
        context_tokens=cost.context_tokens,
        max_draft_tokens=cost.num_draft_tokens,
    )
    times = StageTimes(shape=shape, machine=machine, split=split)
    # The measured engines have one microbatch.
    forecast = PipelineForecast(times=times, load=load, overlaps=False)
    row = forecast.lengths(head_of_costs(costs).acceptance)[-1]
    return Comparison(
        setting=RoundSetting(
            verify_tp=verify_tp,
            num_requests=cost.num_requests,
            num_draft_tokens=cost.num_draft_tokens,
        ),
        predicted_s=row.round_s,
        measured_s=cost.round_s,
        predicted_rate=row.tokens_per_s,
        measured_rate=cost.tokens_per_round / cost.round_s,
    )


def main(options: Options) -> int:
    """Prints a table and the report."""
    say = say_unless(options.json)
    prompts = load_prompts(Tokenizer.load(options.model), SHIPPED_PROMPTS, limit=_NUM_PROMPTS)
    shape = on_cpu(read_shape(Path(options.model)))
    inputs = _settings(1, (1, 8), (0, 1, 2, 4, 8))
    targets = [
        *_settings(1, _BATCHES, _LENGTHS),
        *_settings(_VERIFY_TP, _BATCHES, _LENGTHS),
    ]
    times, costs, links = _measure(options, prompts, shape, inputs=inputs, targets=targets, say=say)
    measured = {
        tp: round_costs({s: times[s] for s in targets if s.verify_tp == tp and s not in inputs})
        for tp in (1, _VERIFY_TP)
    }
    comparisons = compare(shape, costs, links, measured)
    _tell(comparisons, say)
    worst = max(comparison.worst for comparison in comparisons)
    say(f"largest error {worst:.1%}, limit {_LIMIT:.0%}")
    print_report(
        {
            "largest_error": round(worst, 4),
            "comparisons": [comparison.as_json() for comparison in comparisons],
            "costs": write_costs(costs),
            "links": write_links(links),
            "rounds": {
                str(tp): [write_costs(cost) for cost in rounds] for tp, rounds in measured.items()
            },
            "repeats": options.repeats,
        }
    )
    return int(worst > _LIMIT)


def _settings(verify_tp: int, batches: Sequence[int], lengths: Sequence[int]) -> list[RoundSetting]:
    return [
        RoundSetting(verify_tp=verify_tp, num_requests=batch, num_draft_tokens=length)
        for batch in batches
        for length in lengths
    ]


def _measure(
    options: Options,
    prompts: Sequence[Prompt],
    shape: ModelShape,
    *,
    inputs: Sequence[RoundSetting],
    targets: Sequence[RoundSetting],
    say: Say,
) -> tuple[dict[RoundSetting, RoundTimes], StageCosts, tuple[CollectiveFigures, ...]]:
    """Runs everything in turn; returns all rounds, and what the forecast is made from."""
    settings = list(dict.fromkeys([*inputs, *targets]))
    longest = max(len(prompt.tokens) for prompt in prompts) + _MAX_TOKENS
    configs = {
        tp: engine_config(options.model, None, settings=settings, verify_tp=tp, longest=longest)
        for tp in (1, _VERIFY_TP)
    }
    sizes = [rows * shape.hidden_size * shape.bytes_per_activation for rows in _SUM_ROWS]
    times: dict[RoundSetting, RoundTimes] = {}
    sums: list[Times] = []
    with ExitStack() as stack:
        engines = {tp: stack.enter_context(running_pipeline(c)) for tp, c in configs.items()}
        for engine in engines.values():
            warm_up(engine, prompts)
        for repeat in range(options.repeats):
            for batch in (inputs, [setting for setting in settings if setting not in inputs]):
                sums.append(measure_sums(sizes, num_ranks=_VERIFY_TP, work_s=_WORK_S))
                measure_rounds(engines, prompts, batch, max_tokens=_MAX_TOKENS, times=times)
            say(f"repeat {repeat + 1} of {options.repeats} done")
    costs = stage_costs(configs[1], {setting: times[setting] for setting in inputs})
    return times, costs, (_figures(sums, num_ranks=_VERIFY_TP),)


def _figures(sums: Sequence[Times], *, num_ranks: int) -> CollectiveFigures:
    """Returns the medians of all repeats."""
    return CollectiveFigures(
        operation="all_reduce",
        scope="node",
        num_ranks=num_ranks,
        backend="gloo",
        times=tuple(
            (points[0][0], statistics.median(seconds for _, seconds in points))
            for points in zip(*sums, strict=True)
        ),
    )


def _tell(comparisons: Sequence[Comparison], say: Say) -> None:
    say(
        "verify TP  requests  drafted   predicted ms  measured ms   error"
        "   predicted tok/s  measured tok/s   error"
    )
    for row in comparisons:
        setting = row.setting
        say(
            f"{setting.verify_tp:>9}{setting.num_requests:>10}{setting.num_draft_tokens:>9}"
            f"{row.predicted_s * 1e3:>15.2f}{row.measured_s * 1e3:>13.2f}{row.round_error:>+8.1%}"
            f"{row.predicted_rate:>18.1f}{row.measured_rate:>16.1f}{row.rate_error:>+8.1%}"
        )


if __name__ == "__main__":
    raise SystemExit(
        run_command(main, sys.argv[1:], program="python -m tests.support.plan_accuracy")
    )
