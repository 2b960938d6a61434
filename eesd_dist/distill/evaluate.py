"""`eesd distill evaluate`: evaluates a head, with predicted and measured speed.

On prompts used neither for training nor for calibration: acceptance by position, class and
temperature (rounds drafted to the full length); agreement and 1 - TV with the target at each
position of the text it generated; tokens per round; the speed-up predicted by the machine's cost
model; and the measured one, the default controller against plain decoding on the same engine,
alternating by prompt. Texts that differ from plain decoding are counted. The figures and their
settings go to evaluation.json.

Speed is wall time, so that other processes on the machine affect it. Where the target runs in a
service there is none: that service drafts with another head, or with none.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from eesd_dist.checks import require_positive, require_temperatures
from eesd_dist.control.cost import CostModel
from eesd_dist.control.regret import hindsight, position_rates
from eesd_dist.distill.answers import MAX_DRAFT_TOKENS, Answer, Machine, answer, longest
from eesd_dist.distill.executor import Executor, Say
from eesd_dist.distill.folders import write_json
from eesd_dist.distill.timing import Speed, TimedHead, time_head
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import Outcome

EVALUATION_FILE = "evaluation.json"
_NOT_TIMED = "speed: not measured, since the target runs in a service; serve it with this head"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    out: Annotated[Path | None, "folder of evaluation.json (the head's)"] = None
    temperatures: Annotated[tuple[float, ...], "temperatures of the answers"] = (0.0, 0.7, 1.0)
    max_tokens: Annotated[int, "maximum length of an answer"] = 128
    timed_prompts: Annotated[int, "prompts that are also timed, at every temperature"] = 12
    timed_tokens: Annotated[int, "maximum length of a timed answer"] = 96

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens", "timed_prompts", "timed_tokens")
        require_temperatures(self.temperatures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance in rounds drafted to the full length, of one temperature, class or both."""

    num_rounds: int
    num_judged: int
    rate: float
    """Accepted share of the judged tokens."""
    by_position: tuple[float, ...]
    """Acceptance of each position among the rounds that reached it."""
    tokens_per_round: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Similarity of the head's and the target's distributions over generated text."""

    num_positions: int
    agreement: float
    """Share of positions with the same best token."""
    one_minus_tv: float
    """1 - TV at the text's temperature; at temperature 0 the agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Speed over plain decoding by the cost model, with the best lengths in hindsight."""

    best_fixed_length: int
    best_fixed: float
    oracle: float
    """Every round drafts exactly its accepted tokens: an upper bound for controllers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtTemperature:
    temperature: float
    acceptance: Acceptance
    by_class: dict[str, Acceptance]
    likeness: Likeness
    likeness_by_class: dict[str, Likeness]
    prediction: Prediction | None
    speed: Speed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    exit_layer: int
    head_kind: str
    num_parameters: int
    """Parameters of the head, without a shared LM head."""
    temperatures: tuple[AtTemperature, ...]
    speed: Speed | None
    """Speed over all temperatures; None where it was not measured, as the next field."""
    cost_model: CostModel | None


def evaluate(
    machine: Machine,
    prompts: Sequence[Prompt],
    options: EvaluateOptions,
    *,
    seed: int,
    executor: Executor,
    say: Say,
) -> Evaluation:
    """Evaluates and writes evaluation.json, last and atomically. The prompts must not have been
    used for training or calibration."""
    spec = ModelSpec.from_folder(machine.model)
    head = TrainableExitHead.read(machine.head, target=spec, target_path=machine.model)
    answers = answer(
        executor,
        machine,
        prompts,
        temperatures=options.temperatures,
        max_tokens=options.max_tokens,
        seed=seed,
        title="acceptance",
    )
    timed = time_head(
        executor,
        machine,
        prompts[: options.timed_prompts],
        temperatures=options.temperatures,
        max_tokens=options.timed_tokens,
        max_length=longest(prompts) + options.timed_tokens,
        seed=seed,
    )
    evaluation = Evaluation(
        exit_layer=head.exit_layer,
        head_kind=head.config.kind,
        num_parameters=sum(p.numel() for p in head.parameters() if p.requires_grad),
        temperatures=tuple(
            _at(temperature, answers, timed, seed=seed) for temperature in options.temperatures
        ),
        speed=None if timed is None else timed.speed(seed=seed),
        cost_model=None if timed is None else timed.cost,
    )
    content = {
        **asdict(evaluation),
        "cost_model": None if timed is None else timed.cost.to_json(),
        "settings": {
            "prompts": len(prompts),
            "max_tokens": options.max_tokens,
            "timed_prompts": min(options.timed_prompts, len(prompts)),
            "timed_tokens": options.timed_tokens,
            "max_draft_tokens": MAX_DRAFT_TOKENS,
            "dtype": machine.dtype,
            "threads": machine.threads,
        },
        "provenance": collect_provenance(seed=seed).as_json(),
    }
    write_json((options.out or machine.head) / EVALUATION_FILE, content)
    say(table(evaluation))
    return evaluation


def acceptance_of(answers: Sequence[Answer]) -> Acceptance:
    """Returns acceptance; of a text's last round, cut by its length, only judged tokens count."""
    outcomes = _drafted(answers)
    judged = sum(min(o.num_accepted + 1, o.num_drafted) for o in outcomes)
    accepted = sum(o.num_accepted for o in outcomes)
    return Acceptance(
        num_rounds=len(outcomes),
        num_judged=judged,
        rate=accepted / judged if judged else 0.0,
        by_position=position_rates(outcomes, max_length=MAX_DRAFT_TOKENS),
        tokens_per_round=1.0 + accepted / len(outcomes) if outcomes else 1.0,
    )


def _drafted(answers: Sequence[Answer]) -> list[Outcome]:
    return [outcome for answer in answers for outcome in answer.outcomes if outcome.num_drafted]


def _likeness_of(answers: Sequence[Answer]) -> Likeness:
    positions = max(sum(answer.judged.num_positions for answer in answers), 1)
    return Likeness(
        num_positions=positions,
        agreement=sum(answer.judged.agreed for answer in answers) / positions,
        one_minus_tv=sum(answer.judged.accepted for answer in answers) / positions,
    )


def _at(
    temperature: float, answers: Sequence[Answer], timed: TimedHead | None, *, seed: int
) -> AtTemperature:
    at_temperature = [answer for answer in answers if answer.query.temperature == temperature]
    by_class = {
        name: [answer for answer in at_temperature if answer.query.prompt.workload == name]
        for name in sorted({answer.query.prompt.workload for answer in at_temperature})
    }
    return AtTemperature(
        temperature=temperature,
        acceptance=acceptance_of(at_temperature),
        by_class={name: acceptance_of(some) for name, some in by_class.items()},
        likeness=_likeness_of(at_temperature),
        likeness_by_class={name: _likeness_of(some) for name, some in by_class.items()},
        prediction=None if timed is None else _prediction(at_temperature, timed.cost),
        speed=None if timed is None else timed.at(temperature).speed(seed=seed),
    )


def _prediction(answers: Sequence[Answer], cost: CostModel) -> Prediction:
    seen = hindsight(_drafted(answers), cost=cost, max_length=MAX_DRAFT_TOKENS)
    return Prediction(
        best_fixed_length=seen.best_fixed_length,
        best_fixed=seen.best_fixed_rate / seen.plain_rate,
        oracle=seen.oracle_rate / seen.plain_rate,
    )


def table(evaluation: Evaluation) -> str:
    """Returns a table: a line per temperature and class, acceptance by position, and the speed if
    it was measured."""
    lines = [
        f"exit layer {evaluation.exit_layer}, {evaluation.head_kind} head, "
        f"{evaluation.num_parameters:,} parameters",
        "",
        f"{'T':>4} {'class':14}{'accepted':>9}{'agree':>8}{'1-TV':>8}{'tok/round':>10}"
        "   accepted by position",
    ]
    for at in evaluation.temperatures:
        rows = [("all", at.acceptance, at.likeness)]
        if len(at.by_class) > 1:
            rows += [(name, at.by_class[name], at.likeness_by_class[name]) for name in at.by_class]
        for name, acceptance, likeness in rows:
            positions = " ".join(f"{rate:.2f}" for rate in acceptance.by_position)
            lines.append(
                f"{at.temperature:>4.1f} {name[:13]:14}{acceptance.rate:>9.3f}"
                f"{likeness.agreement:>8.3f}{likeness.one_minus_tv:>8.3f}{acceptance.tokens_per_round:>10.2f}"
                f"   {positions}"
            )
    if evaluation.speed is None:
        return "\n".join([*lines, "", _NOT_TIMED])
    lines += [
        "",
        f"{'T':>4} {'plain tok/s':>12}{'tok/s':>8}{'measured':>10}{'95% interval':>17}"
        f"{'predicted':>11}{'best fixed':>12}{'oracle':>8}{'unlike plain':>14}",
    ]
    for at in evaluation.temperatures:
        assert at.speed is not None, "measured at every temperature"
        assert at.prediction is not None
        fixed = f"{at.prediction.best_fixed:.2f}x @{at.prediction.best_fixed_length}"
        lines.append(
            f"{at.temperature:>4.1f} {_speed_cells(at.speed)}{fixed:>12}"
            f"{at.prediction.oracle:>7.2f}x{at.speed.texts_unlike_plain:>14}"
        )
    everything = evaluation.speed
    lines.append(f" all {_speed_cells(everything)}{'':>20}{everything.texts_unlike_plain:>14}")
    return "\n".join(lines)


def _speed_cells(speed: Speed) -> str:
    interval = f"{speed.low:.2f} to {speed.high:.2f}"
    return (
        f"{speed.plain_tokens_per_s:>12.1f}{speed.tokens_per_s:>8.1f}{speed.over_plain:>9.2f}x"
        f"{interval:>17}{speed.predicted_over_plain:>10.2f}x"
    )
