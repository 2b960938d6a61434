"""`eesd distill sweep`: chooses exit layer and kind of head by measured time.

Every combination is trained briefly on the same features, calibrated, and timed on this machine in
a separate process: the default controller against plain decoding, alternating by prompt. A deeper
exit layer has a higher acceptance and costs more to draft with, so that acceptance alone does not
determine the best one (Decoding Speculative Decoding, arXiv 2402.01528): the sweep recommends the
combination with the highest measured speed-up. Finished combinations are not repeated.

A folder `exit_N_KIND` of OUT is an ordinary head; sweep.json has the table.
"""

import hashlib
import multiprocessing
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args

from eesd_dist.checks import require_positive, require_temperatures
from eesd_dist.distill.answers import Machine
from eesd_dist.distill.calibrate import CalibrateOptions
from eesd_dist.distill.evaluate import EVALUATION_FILE, EvaluateOptions
from eesd_dist.distill.executor import Executor, Say
from eesd_dist.distill.features import FeatureStore, identity_of
from eesd_dist.distill.folders import claim, only_one, write_json
from eesd_dist.distill.run import HeadRequest, make_head
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.errors import ConfigError
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import Prompt

SWEEP_FILE = "sweep.json"
_SETTINGS_FILE = "asked.json"
_FOLDER_NAME = re.compile(r"exit_(\d+)_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Exit layer and kind of one head to try."""

    exit_layer: int
    head: HeadKind

    @property
    def name(self) -> str:
        return f"exit_{self.exit_layer}_{self.head}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """Exit layers and kinds of head to combine."""

    exits: Annotated[tuple[int, ...], "layers to try"] = (1, 2, 4)
    heads: Annotated[tuple[HeadKind, ...], "kinds of head to try"] = ("truncated",)

    def combinations(self) -> tuple[Combination, ...]:
        return tuple(
            Combination(exit_layer=exit_layer, head=head)
            for exit_layer, head in product(sorted(set(self.exits)), dict.fromkeys(self.heads))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFiles:
    """Folders of the features and of the heads."""

    out: Annotated[Path, "folder of the heads and of sweep.json"]
    features: Annotated[Path | None, "output of `eesd distill collect` (OUT/features)"] = None
    collect: Annotated[bool, "collect the features of all exits first"] = False
    collect_minutes: Annotated[float | None, "start no shard after this time"] = None

    @property
    def features_folder(self) -> Path:
        return self.features or self.out / "features"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options for training and timing each combination."""

    draft_vocab: Annotated[int, "tokens of a truncated head"] = 2048
    minutes_each: Annotated[float | None, "minutes of training"] = 3.0
    steps_each: Annotated[int | None, "maximum training steps"] = None
    learning_rate: Annotated[float, "--rate: maximum learning rate"] = TrainOptions().learning_rate
    timed_prompts: Annotated[int, "timed prompts at every temperature"] = 12
    timed_tokens: Annotated[int, "maximum length of a timed answer"] = 96

    def __post_init__(self) -> None:
        require_positive(self, "minutes_each", "steps_each", "draft_vocab")
        require_positive(self, "timed_prompts", "timed_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """A sweep over one target, with its files."""

    machine: Machine
    """Target and settings; the head is replaced by the one being tried."""
    features: Path
    out: Path
    combinations: tuple[Combination, ...]
    calibrated: tuple[Prompt, ...]
    judged: tuple[Prompt, ...]
    """Prompts for evaluation, used neither for training nor for calibration."""
    options: SweepOptions
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 96
    """Maximum length of the answers for calibration and evaluation."""
    seed: int = 0
    training: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens")
        require_temperatures(self.temperatures)

    def settings(self) -> dict[str, object]:
        """Returns options that must not change between runs into one folder; combinations may."""
        options = self.options
        return {
            "features": str(self.features.resolve()),
            "minutes_each": options.minutes_each,
            "max_steps": options.steps_each,
            "draft_vocab": options.draft_vocab,
            "temperatures": list(self.temperatures),
            "max_tokens": self.max_tokens,
            "num_timed": options.timed_prompts,
            "timed_tokens": options.timed_tokens,
            "seed": self.seed,
            "target": identity_of(self.machine.model).sha256,
            "dtype": self.machine.dtype,
            "threads": self.machine.threads,
            "prompts": self._prompts_sha256(),
            "learning_rate": options.learning_rate,
            "rows": self.training.rows,
            "length": self.training.length,
        }

    def _prompts_sha256(self) -> str:
        prompts = (*self.calibrated, *self.judged)
        return hashlib.sha256(repr([prompt.tokens for prompt in prompts]).encode()).hexdigest()

    def head_request(self, tried: Combination) -> HeadRequest:
        folder, options = self.out / tried.name, self.options
        return HeadRequest(
            training=TrainRequest(
                model=self.machine.model,
                features=self.features,
                out=folder,
                checkpoints=self.out / "runs" / tried.name,
                exit_layer=tried.exit_layer,
                head=tried.head,
                draft_vocab=options.draft_vocab,
                minutes=options.minutes_each,
                max_steps=options.steps_each,
                seed=self.seed,
                options=replace(self.training, learning_rate=options.learning_rate),
            ),
            machine=replace(self.machine, head=folder),
            calibrated=self.calibrated,
            judged=self.judged,
            calibration=CalibrateOptions(
                temperatures=self.temperatures, max_tokens=self.max_tokens
            ),
            evaluation=EvaluateOptions(
                temperatures=self.temperatures,
                max_tokens=self.max_tokens,
                timed_prompts=options.timed_prompts,
                timed_tokens=options.timed_tokens,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Measurements of one combination."""

    name: str
    exit_layer: int
    head: str
    num_parameters: int
    """Number of trained parameters."""
    agreement: float
    one_minus_tv: float
    acceptance: float
    """Accepted share of the judged tokens, in drafts of full length."""
    draft_step_ms: float
    tokens_per_round: float
    """Tokens per round with the default controller, as the next three fields."""
    tokens_per_s: float
    plain_tokens_per_s: float
    over_plain: float
    """Measured alternately, in one process."""
    low: float
    high: float
    texts_unlike_plain: int

    @classmethod
    def of(cls, combination: Combination, evaluation: Mapping[str, Any]) -> "SweepRow":
        at = evaluation["temperatures"]
        speed = evaluation["speed"]
        return cls(
            name=combination.name,
            **asdict(combination),
            num_parameters=evaluation["num_parameters"],
            agreement=_mean(at, "likeness", "agreement", weight="num_positions"),
            one_minus_tv=_mean(at, "likeness", "one_minus_tv", weight="num_positions"),
            acceptance=_mean(at, "acceptance", "rate", weight="num_judged"),
            draft_step_ms=1e3 * evaluation["cost_model"]["draft_step_s"],
            **{
                name: speed[name]
                for name in (
                    "tokens_per_round",
                    "tokens_per_s",
                    "plain_tokens_per_s",
                    "over_plain",
                    "low",
                    "high",
                    "texts_unlike_plain",
                )
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    rows: tuple[SweepRow, ...]
    """Rows in order of speed, the fastest first."""

    @property
    def best(self) -> SweepRow | None:
        """The fastest row; None if plain decoding is faster than all."""
        return self.rows[0] if self.rows[0].over_plain > 1.0 else None


def sweep(request: SweepRequest, *, executor: Executor, say: Say) -> SweepReport:
    """Tries the remaining combinations and writes sweep.json.

    Raises ConfigError if the folder has other settings, or the features lack a layer.
    """
    _require_layers(request)
    settings = request.settings()
    tried = request.combinations
    with only_one(request.out):
        # A table must not mix figures of different settings.
        claim(request.out / _SETTINGS_FILE, settings)
        for number, combination in enumerate(tried, start=1):
            say(f"sweep: {number} of {len(tried)}, {combination.name}")
            _try_apart(request, combination, executor)
        report = _report(request.out)
        best = report.best
        write_json(
            request.out / SWEEP_FILE,
            {
                "recommended": None if best is None else best.name,
                "reason": recommendation(report),
                "rows": [asdict(row) for row in report.rows],
                "asked": settings,
                "provenance": collect_provenance(seed=request.seed).as_json(),
            },
        )
    return report


def _try_apart(request: SweepRequest, combination: Combination, executor: Executor) -> None:
    """Tries a combination in a separate process, so that its memory does not slow the next one."""
    if (request.out / combination.name / EVALUATION_FILE).exists():
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
        process.submit(
            make_head, request.head_request(combination), executor=executor, say=_on_stderr
        ).result()


def _on_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")


def _require_layers(request: SweepRequest) -> None:
    store = FeatureStore.of_target(request.features, request.machine.model)
    layers = {combination.exit_layer for combination in request.combinations}
    missing = sorted(layers.difference(store.manifest.exits))
    if missing:
        raise ConfigError(
            f"{request.features}: found states after layers {list(store.manifest.exits)}, none "
            f"after {missing}: collect with --exits {' '.join(str(n) for n in sorted(layers))} "
            "(or --collect), or sweep over fewer layers"
        )


def _report(out: Path) -> SweepReport:
    rows = [
        SweepRow.of(combination, read_json(out / combination.name / EVALUATION_FILE))
        for combination in _measured(out)
    ]
    return SweepReport(rows=tuple(sorted(rows, key=lambda row: -row.over_plain)))


def _measured(out: Path) -> list[Combination]:
    """Returns all combinations in the folder, including those of earlier commands."""
    combinations = {
        combination.name: combination
        for folder in out.glob("exit_*")
        if (match := _FOLDER_NAME.match(folder.name))
        for combination in Tries(exits=(int(match[1]),), heads=get_args(HeadKind)).combinations()
    }
    return [
        combination
        for name, combination in sorted(combinations.items())
        if (out / name / EVALUATION_FILE).exists()
    ]


def _mean(at: Sequence[Mapping[str, Any]], field: str, name: str, *, weight: str) -> float:
    """Returns the mean over temperatures, weighted by the number of observations."""
    total = sum(entry[field][weight] for entry in at)
    return float(sum(entry[field][name] * entry[field][weight] for entry in at) / max(total, 1))


def table(report: SweepReport) -> str:
    """Returns the rows and the recommendation as text."""
    lines = [
        f"{'exit':>4} {'head':22}{'trained':>13}{'agree':>7}{'1-TV':>7}{'accepted':>9}"
        f"{'step ms':>9}{'tok/round':>10}{'tok/s':>8}{'plain':>8}{'speed-up':>9}  95% interval"
    ]
    lines += [
        f"{row.exit_layer:>4} {row.head:22}"
        f"{row.num_parameters:>13,}{row.agreement:>7.3f}{row.one_minus_tv:>7.3f}"
        f"{row.acceptance:>9.3f}{row.draft_step_ms:>9.2f}{row.tokens_per_round:>10.2f}"
        f"{row.tokens_per_s:>8.1f}{row.plain_tokens_per_s:>8.1f}{row.over_plain:>8.2f}x"
        f"  {row.low:.2f} to {row.high:.2f}"
        for row in report.rows
    ]
    return "\n".join([*lines, "", recommendation(report)])


def recommendation(report: SweepReport) -> str:
    """Returns which combination to take, and why not the one with the highest acceptance."""
    best = report.best
    if best is None:
        closest = report.rows[0]
        return (
            f"Take none: with the best of them, {closest.name}, decoding runs at "
            f"{closest.over_plain:.2f}x plain. Train longer, try a smaller exit layer, or leave "
            "speculation off."
        )
    words = [
        f"Take {best.name}: {best.tokens_per_s:.1f} tokens/s where plain decoding gives "
        f"{best.plain_tokens_per_s:.1f}, {best.over_plain:.2f}x "
        f"({best.low:.2f} to {best.high:.2f})."
    ]
    if best.low <= 1.0:
        words.append("With so few texts the difference to plain decoding is not significant.")
    rivals = [row for row in report.rows[1:] if row.high >= best.low]
    likeliest = max(report.rows, key=lambda row: row.acceptance)
    if likeliest is not best and likeliest not in rivals:
        words.append(_why_it_loses(likeliest, best))
    if rivals:
        words.append(
            f"Not significantly slower: {', '.join(row.name for row in rivals)}; time more prompts "
            "(--timed-prompts) before choosing between them."
        )
    return " ".join(words)


def _why_it_loses(row: SweepRow, best: SweepRow) -> str:
    sentence = (
        f"{row.name} is accepted more often ({row.acceptance:.3f} against {best.acceptance:.3f}) "
        f"and loses: it decodes at {row.over_plain:.2f}x"
    )
    if row.draft_step_ms <= best.draft_step_ms:
        return f"{sentence}."
    return (
        f"{sentence}, since it drafts a token in {row.draft_step_ms:.2f} ms against "
        f"{best.draft_step_ms:.2f}."
    )
