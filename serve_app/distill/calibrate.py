"""`eesd distill calibrate`: how likely is a draft token to be accepted, by what the head says?

    eesd distill calibrate --model TARGET --head HEAD [--prompts FILE.jsonl] [--out FOLDER]

Prompts that were kept aside are answered with rounds drafted to the full length. The map is fitted
to all of them; how well it holds is said by fits that have not seen the prompt they judge. Beside
calibration.json it writes reliability.json and reliability.png: forecasts against what came true,
before (the head's own top-1 probability) and after. What is fitted is a `Calibrator`.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eesd_dist.control.calibrator import (
    CALIBRATION_FILE,
    ReliabilityBin,
    equal_mass_calibration_error,
    expected_calibration_error,
    judged_tokens,
    reliability_table,
)
from eesd_dist.control.fitting import fit_calibrator
from eesd_dist.distill.checks import require_positive, require_temperatures
from eesd_dist.distill.folders import write_json
from eesd_dist.distill.plots import draw_reliability
from eesd_dist.distill.rounds import Asked, Machine, Ran, drafting_engine, run_rounds
from eesd_dist.errors import ConfigError
from eesd_dist.model.spec import ModelSpec
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import Prompt
from eesd_dist.types import Evidence
from serve_app.distill.kept_aside import add_flags, machine_and_prompts
from serve_app.distill.words import Say, on_stderr

DEFAULT_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
_FOLDS = 4

RELIABILITY_FILE = "reliability.json"
PLOT_FILE = "reliability.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    machine: Machine
    prompts: tuple[Prompt, ...]
    """Kept aside: the head has learnt from none of them."""
    out: Path | None = None
    """None: the head's own folder, where serving looks for it."""
    temperatures: tuple[float, ...] = DEFAULT_TEMPERATURES
    max_tokens: int = 144
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(max_tokens=self.max_tokens)
        require_temperatures(self.temperatures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Of forecasts: their errors, and the table behind the diagram."""

    ece: float
    """Expected calibration error over ten bins of equal width."""
    ece_equal_mass: float
    """Over ten bins of equally many tokens."""
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    num_fitted: int
    num_judged: int
    acceptance: float
    """Share of the judged tokens that were accepted."""
    before: Reliability
    after: Reliability


def calibrate(request: CalibrateRequest, *, say: Say) -> CalibrationReport:
    """Fits, judges and writes; calibration.json whole, and before the plot."""
    machine = request.machine
    spec = ModelSpec.from_folder(machine.model)
    out = request.out or machine.head
    longest = max(len(prompt.tokens) for prompt in request.prompts) + request.max_tokens
    ran = run_rounds(
        drafting_engine(machine, max_length=longest),
        _asked(request),
        max_tokens=request.max_tokens,
        stop_token_ids=spec.eos_token_ids,
        title="calibrate",
    )
    judged = _judged(ran)
    forecasts = _forecasts_of_others(request.prompts, ran)
    if not judged or not forecasts:
        raise ConfigError(
            f"{machine.head}: {len(judged)} draft tokens of {len(request.prompts)} prompts are not "
            "enough to fit on some and judge by others: hold more prompts out"
        )
    calibrator = fit_calibrator(judged)
    report = CalibrationReport(
        num_fitted=len(judged),
        num_judged=len(forecasts),
        acceptance=sum(accepted for _, accepted in judged) / len(judged),
        before=_reliability([(evidence.top1_prob, accepted) for evidence, accepted in judged]),
        after=_reliability(forecasts),
    )
    out.mkdir(parents=True, exist_ok=True)
    provenance = collect_provenance(seed=request.seed).as_json()
    write_json(out / RELIABILITY_FILE, {**asdict(report), "provenance": provenance})
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=out) as aside:
        calibrator.save(Path(aside)).replace(out / CALIBRATION_FILE)
    draw_reliability(
        out / PLOT_FILE,
        before=report.before.bins,
        after=report.after.bins,
        title=f"{report.num_judged} judged tokens: ECE {report.before.ece:.3f} before, "
        f"{report.after.ece:.3f} after",
    )
    say(f"calibrate: {described(report)}")
    return report


def described(report: CalibrationReport) -> str:
    return (
        f"expected calibration error {report.before.ece:.4f} before (the head's top-1 probability),"
        f" {report.after.ece:.4f} after, on {report.num_judged} tokens, each forecast without its "
        f"own prompt ({report.acceptance:.1%} accepted)"
    )


def _forecasts_of_others(prompts: Sequence[Prompt], ran: Sequence[Ran]) -> list[tuple[float, bool]]:
    """Every judged token's forecast by a calibrator that has seen none of its prompt: the prompts
    in four folds, each judged by a fit on the other three."""
    fold_of = {prompt: number % _FOLDS for number, prompt in enumerate(prompts)}
    forecasts: list[tuple[float, bool]] = []
    for fold in range(_FOLDS):
        seen = _judged([one for one in ran if fold_of[one.asked.prompt] != fold])
        unseen = _judged([one for one in ran if fold_of[one.asked.prompt] == fold])
        if seen:
            calibrator = fit_calibrator(seen)
            forecasts += [(calibrator.probability(e), accepted) for e, accepted in unseen]
    return forecasts


def _asked(request: CalibrateRequest) -> list[Asked]:
    return [
        Asked(prompt=prompt, temperature=temperature, seed=request.seed + number)
        for temperature in request.temperatures
        for number, prompt in enumerate(request.prompts)
    ]


def _judged(ran: Sequence[Ran]) -> list[tuple[Evidence, bool]]:
    return judged_tokens(outcome for one in ran for outcome in one.outcomes)


def _reliability(forecasts: Sequence[tuple[float, bool]]) -> Reliability:
    return Reliability(
        ece=expected_calibration_error(forecasts),
        ece_equal_mass=equal_mass_calibration_error(forecasts),
        bins=reliability_table(forecasts),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="eesd distill calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, temperatures=DEFAULT_TEMPERATURES, max_tokens=144)
    add = parser.add_argument
    add("--out", type=Path, help="folder to write to (the head's)")
    options = parser.parse_args(argv)
    machine, parts = machine_and_prompts(options)
    request = CalibrateRequest(
        machine=machine,
        prompts=parts.calibrated,
        out=options.out,
        temperatures=tuple(options.temperatures),
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    calibrate(request, say=on_stderr)
    return 0
