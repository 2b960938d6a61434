"""`eesd distill calibrate`: fits the probability of acceptance to the head's evidence.

Held-out prompts are answered with rounds drafted to the full length. A `Calibrator` is fitted to
all of them; its error is estimated by cross-validation over prompts. In addition to
calibration.json it writes reliability.json and reliability.png: forecasts against accepted shares,
before (the head's top-1 probability) and after; and the errors at each temperature and of each
class of prompts, since errors of opposite sign cancel in a pooled figure.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from eesd_dist.checks import require_positive, require_temperatures
from eesd_dist.control.calibrator import (
    CALIBRATION_FILE,
    ReliabilityBin,
    equal_mass_calibration_error,
    expected_calibration_error,
    judged_tokens,
    reliability_table,
)
from eesd_dist.control.fitting import fit_calibrator
from eesd_dist.distill.answers import Answer, Machine, answer
from eesd_dist.distill.executor import Executor, Say
from eesd_dist.distill.folders import write_json
from eesd_dist.errors import ConfigError
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import Evidence

_FOLDS = 4
_RELIABILITY_FILE = "reliability.json"
_PLOT_FILE = "reliability.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    out: Annotated[Path | None, "output folder (the head's folder, which serving reads)"] = None
    temperatures: Annotated[tuple[float, ...], "temperatures of the answers"] = (
        0.0,
        0.5,
        0.8,
        1.0,
    )
    max_tokens: Annotated[int, "maximum length of an answer"] = 144

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens")
        require_temperatures(self.temperatures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Errors of forecasts, and the table of the reliability diagram."""

    ece: float
    """Expected calibration error over ten bins of equal width."""
    ece_equal_mass: float
    """The same over ten bins with equal numbers of tokens."""
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReliability:
    """Errors of the forecasts at one temperature, or of one class of prompts."""

    num_judged: int
    acceptance: float
    before: Reliability
    after: Reliability


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    num_fitted: int
    num_judged: int
    acceptance: float
    """Share of the judged tokens that were accepted."""
    before: Reliability
    after: Reliability
    by_temperature: dict[str, PartReliability]
    by_class: dict[str, PartReliability]

    @property
    def worst(self) -> tuple[str, PartReliability]:
        """Returns the part with the largest error after calibration, and its name."""
        groups = {
            **{f"T = {name}": group for name, group in self.by_temperature.items()},
            **{f"class {name}": group for name, group in self.by_class.items()},
        }
        return max(groups.items(), key=lambda pair: pair[1].after.ece)


def calibrate(
    machine: Machine,
    prompts: Sequence[Prompt],
    options: CalibrateOptions,
    *,
    seed: int,
    executor: Executor,
    say: Say,
) -> CalibrationReport:
    """Fits, evaluates and writes the files; calibration.json atomically, before the plot. The head
    must not have been trained on any of the prompts."""
    answers = answer(
        executor,
        machine,
        prompts,
        temperatures=options.temperatures,
        max_tokens=options.max_tokens,
        seed=seed,
        title="calibrate",
    )
    judged = _judged(answers)
    forecasts = _forecasts_of_others(prompts, answers)
    if not judged or not forecasts:
        raise ConfigError(
            f"{machine.head}: {len(judged)} draft tokens of {len(prompts)} prompts are not "
            "enough for cross-validation: hold more prompts out"
        )
    calibrator = fit_calibrator(judged)
    report = CalibrationReport(
        num_fitted=len(judged),
        num_judged=len(forecasts),
        acceptance=sum(accepted for _, accepted in judged) / len(judged),
        before=_reliability([(evidence.top1_prob, accepted) for evidence, accepted in judged]),
        after=_reliability([(forecast.after, forecast.accepted) for forecast in forecasts]),
        by_temperature=_groups(forecasts, of=lambda forecast: f"{forecast.temperature:g}"),
        by_class=_groups(forecasts, of=lambda forecast: forecast.workload),
    )
    out = options.out or machine.head
    out.mkdir(parents=True, exist_ok=True)
    provenance = collect_provenance(seed=seed).as_json()
    write_json(out / _RELIABILITY_FILE, {**asdict(report), "provenance": provenance})
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=out) as aside:
        calibrator.save(Path(aside)).replace(out / CALIBRATION_FILE)
    _draw_reliability(
        out / _PLOT_FILE,
        before=report.before.bins,
        after=report.after.bins,
        title=f"{report.num_judged} judged tokens: ECE {report.before.ece:.3f} before, "
        f"{report.after.ece:.3f} after",
    )
    say(f"calibrate: {described(report)}")
    return report


def described(report: CalibrationReport) -> str:
    name, worst = report.worst
    return (
        f"expected calibration error {report.before.ece:.4f} before (the head's top-1 probability),"
        f" {report.after.ece:.4f} after, on {report.num_judged} tokens, each forecast without its "
        f"own prompt ({report.acceptance:.1%} accepted); largest at {name}: "
        f"{worst.before.ece:.4f} before, {worst.after.ece:.4f} after, on {worst.num_judged} tokens"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """The forecast of one judged token."""

    temperature: float
    workload: str
    before: float
    after: float
    accepted: bool


def _forecasts_of_others(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[_Forecast]:
    """Returns forecasts of every judged token by cross-validation: the prompts are in four folds,
    and each fold is forecast by a fit on the other three."""
    fold_of = {prompt: number % _FOLDS for number, prompt in enumerate(prompts)}
    forecasts: list[_Forecast] = []
    for fold in range(_FOLDS):
        seen = _judged([answer for answer in answers if fold_of[answer.query.prompt] != fold])
        if not seen:
            continue
        calibrator = fit_calibrator(seen)
        forecasts += [
            _Forecast(
                temperature=answer.query.temperature,
                workload=answer.query.prompt.workload,
                before=evidence.top1_prob,
                after=calibrator.probability(evidence),
                accepted=accepted,
            )
            for answer in answers
            if fold_of[answer.query.prompt] == fold
            for evidence, accepted in _judged([answer])
        ]
    return forecasts


def _groups(
    forecasts: Sequence[_Forecast], *, of: Callable[[_Forecast], str]
) -> dict[str, PartReliability]:
    by_name: dict[str, list[_Forecast]] = {}
    for forecast in forecasts:
        by_name.setdefault(of(forecast), []).append(forecast)
    return {
        name: PartReliability(
            num_judged=len(some),
            acceptance=sum(forecast.accepted for forecast in some) / len(some),
            before=_reliability([(forecast.before, forecast.accepted) for forecast in some]),
            after=_reliability([(forecast.after, forecast.accepted) for forecast in some]),
        )
        for name, some in sorted(by_name.items())
    }


def _judged(answers: Sequence[Answer]) -> list[tuple[Evidence, bool]]:
    return judged_tokens(outcome for answer in answers for outcome in answer.outcomes)


def _reliability(forecasts: Sequence[tuple[float, bool]]) -> Reliability:
    return Reliability(
        ece=expected_calibration_error(forecasts),
        ece_equal_mass=equal_mass_calibration_error(forecasts),
        bins=reliability_table(forecasts),
    )


def _draw_reliability(
    file: Path, *, before: Sequence[ReliabilityBin], after: Sequence[ReliabilityBin], title: str
) -> None:
    """Draws accepted shares by forecast; the area of a point is its share of the tokens."""
    # Imported only when a plot is drawn; works without a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 5.0), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([0.0, 1.0], [0.0, 1.0], color="0.6", linewidth=0.8, linestyle="--")
    for bins, label, colour in (
        (before, "head's own top-1 probability", "#d1495b"),
        (after, "calibrated", "#1b6ca8"),
    ):
        total = sum(bin_.num_judged for bin_ in bins)
        forecasts = [bin_.mean_forecast for bin_ in bins]
        shares = [bin_.accepted_share for bin_ in bins]
        axes.plot(forecasts, shares, color=colour, linewidth=1.0)
        sizes = [10.0 + 600.0 * bin_.num_judged / total for bin_ in bins]
        axes.scatter(forecasts, shares, s=sizes, color=colour, alpha=0.6, label=label)
    axes.set(
        xlim=(0.0, 1.0),
        ylim=(0.0, 1.0),
        xlabel="forecast",
        ylabel="share accepted",
        aspect="equal",
    )
    axes.set_title(title, fontsize=9)
    axes.legend(loc="upper left", fontsize=8, markerscale=0.4)
    partial = file.with_name(f".{file.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(file)
