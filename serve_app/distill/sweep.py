"""`eesd distill sweep`: which exit layer and which kind of head to take, by measured time.

    eesd distill sweep --model TARGET --features FEATURES --exits 1 2 4 --heads shared truncated \\
        --minutes-each 3 --out OUT
    eesd distill sweep --model TARGET --collect --exits 1 2 4 --out OUT

Every combination is trained for a short while on the same features, calibrated, and timed on this
machine: its default controller against plain decoding, the same prompts in turn, in a process of
its own. A deeper exit layer is accepted more often and dearer to draft with; which of the two wins
is a question of time, not of acceptance (Decoding Speculative Decoding, arXiv 2402.01528), so the
answer is the combination with the highest measured speed-up. What is done already, combination by
combination, is not done again.

A folder `exit_N_KIND` of OUT is a head like any other; sweep.json holds the table.
"""

import argparse
import hashlib
import multiprocessing
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from eesd_dist.control.calibrator import CALIBRATION_FILE
from eesd_dist.distill.checks import require_positive, require_temperatures
from eesd_dist.distill.features import FeatureStore, identity_of
from eesd_dist.distill.folders import only_one, write_json
from eesd_dist.distill.held_out import read_prompts, require_kept_aside
from eesd_dist.distill.rounds import Machine
from eesd_dist.distill.train.learner import TrainOptions, TrainRequest
from eesd_dist.errors import ConfigError
from eesd_dist.model.head_config import HeadKind
from eesd_dist.model.spec import read_json
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import Prompt
from serve_app.distill import collect as collecting
from serve_app.distill.calibrate import CalibrateRequest, calibrate
from serve_app.distill.evaluate import EVALUATION_FILE, EvaluateRequest, evaluate
from serve_app.distill.train import train
from serve_app.distill.words import Say, on_stderr

SWEEP_FILE = "sweep.json"
_ASKED_FILE = "asked.json"
_FOLDER_NAME = re.compile(r"exit_(\d+)_")
Embedding = Literal["without", "with", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One head to try."""

    exit_layer: int
    head: HeadKind
    reads_embedding: bool

    @property
    def name(self) -> str:
        suffix = "_embedding" if self.reads_embedding else ""
        return f"exit_{self.exit_layer}_{self.head}{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """What to try, and how long."""

    machine: Machine
    """Its head is the one that is being tried."""
    features: Path
    out: Path
    combinations: tuple[Combination, ...]
    calibrated: tuple[Prompt, ...]
    judged: tuple[Prompt, ...]
    """Neither learnt from nor calibrated on."""
    minutes_each: float | None = 3.0
    max_steps: int | None = None
    draft_vocab: int = 2048
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 96
    """Of the texts that are calibrated and judged on."""
    num_timed: int = 12
    timed_tokens: int = 96
    seed: int = 0
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        require_positive(
            minutes_each=self.minutes_each,
            max_steps=self.max_steps,
            draft_vocab=self.draft_vocab,
            max_tokens=self.max_tokens,
            num_timed=self.num_timed,
            timed_tokens=self.timed_tokens,
        )
        require_temperatures(self.temperatures)

    def asked(self) -> dict[str, object]:
        """What may not change between two runs into one folder; combinations may be added."""
        said = asdict(self)
        for name in ("out", "combinations", "machine", "options", "calibrated", "judged"):
            del said[name]
        said |= {
            "target": identity_of(self.machine.model).sha256,
            "dtype": self.machine.dtype,
            "threads": self.machine.threads,
            "prompts": _digest((*self.calibrated, *self.judged)),
            "learning_rate": self.options.learning_rate,
            "rows": self.options.rows,
            "length": self.options.length,
            "features": str(self.features.resolve()),
            "temperatures": list(self.temperatures),
        }
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination, measured."""

    name: str
    exit_layer: int
    head: str
    reads_embedding: bool
    num_parameters: int
    """That are trained."""
    agreement: float
    one_minus_tv: float
    acceptance: float
    """Share of the judged draft tokens, drafts of full length."""
    draft_step_ms: float
    tokens_per_round: float
    """Under the default controller, as the three below."""
    tokens_per_s: float
    plain_tokens_per_s: float
    over_plain: float
    """Measured in turn, in one process."""
    low: float
    high: float
    texts_unlike_plain: int

    @classmethod
    def of(cls, combination: Combination, evaluation: Mapping[str, Any]) -> "Row":
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
    rows: tuple[Row, ...]
    """The fastest first."""

    @property
    def best(self) -> Row | None:
        """None when plain decoding beats them all."""
        return self.rows[0] if self.rows[0].over_plain > 1.0 else None


def combinations(
    exits: Sequence[int], heads: Sequence[HeadKind], embedding: Embedding
) -> tuple[Combination, ...]:
    reads = {"without": (False,), "with": (True,), "both": (False, True)}[embedding]
    return tuple(
        Combination(exit_layer=exit_layer, head=head, reads_embedding=reads_embedding)
        for exit_layer, head, reads_embedding in product(
            sorted(set(exits)), dict.fromkeys(heads), reads
        )
    )


def sweep(request: SweepRequest, *, say: Say) -> SweepReport:
    """Tries what has not been tried yet and writes sweep.json.

    Raises ConfigError when the folder was begun with other settings, or the features lack a layer.
    """
    _require_layers(request)
    with only_one(request.out):
        _claim(request)
        for number, combination in enumerate(request.combinations, start=1):
            say(f"sweep: {number} of {len(request.combinations)}, {combination.name}")
            _try_apart(request, combination)
        report = _report(request)
        best = report.best
        write_json(
            request.out / SWEEP_FILE,
            {
                "recommended": None if best is None else best.name,
                "reason": recommendation(report),
                "rows": [asdict(row) for row in report.rows],
                "asked": request.asked(),
                "provenance": collect_provenance(seed=request.seed).as_json(),
            },
        )
    return report


def try_one(request: SweepRequest, combination: Combination) -> None:
    """Trains, calibrates and evaluates one head; the files say which of it is done."""
    folder = request.out / combination.name
    if not (folder / "config.json").exists():
        train(_train_request(request, combination))
    machine = replace(request.machine, head=folder)
    if not (folder / CALIBRATION_FILE).exists():
        calibrate(
            CalibrateRequest(
                machine=machine,
                prompts=request.calibrated,
                temperatures=request.temperatures,
                max_tokens=request.max_tokens,
                seed=request.seed,
            ),
            say=on_stderr,
        )
    if not (folder / EVALUATION_FILE).exists():
        evaluate(
            EvaluateRequest(
                machine=machine,
                prompts=request.judged,
                temperatures=request.temperatures,
                max_tokens=request.max_tokens,
                num_timed=request.num_timed,
                timed_tokens=request.timed_tokens,
                seed=request.seed,
            ),
            say=on_stderr,
        )


def table(report: SweepReport) -> str:
    """The rows, for people."""
    lines = [
        f"{'exit':>4} {'head':22}{'trained':>13}{'agree':>7}{'1-TV':>7}{'accepted':>9}"
        f"{'step ms':>9}{'tok/round':>10}{'tok/s':>8}{'plain':>8}{'speed-up':>9}  95% interval"
    ]
    lines += [
        f"{row.exit_layer:>4} {row.head + (' + embedding' if row.reads_embedding else ''):22}"
        f"{row.num_parameters:>13,}{row.agreement:>7.3f}{row.one_minus_tv:>7.3f}"
        f"{row.acceptance:>9.3f}{row.draft_step_ms:>9.2f}{row.tokens_per_round:>10.2f}"
        f"{row.tokens_per_s:>8.1f}{row.plain_tokens_per_s:>8.1f}{row.over_plain:>8.2f}x"
        f"  {row.low:.2f} to {row.high:.2f}"
        for row in report.rows
    ]
    return "\n".join([*lines, "", recommendation(report)])


def recommendation(report: SweepReport) -> str:
    """Which one to take, and why not the one that is accepted most often."""
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
        words.append("So few texts do not tell it from plain decoding.")
    rivals = [row for row in report.rows[1:] if row.high >= best.low]
    likeliest = max(report.rows, key=lambda row: row.acceptance)
    if likeliest is not best and likeliest not in rivals:
        words.append(_why_it_loses(likeliest, best))
    if rivals:
        words.append(
            f"Not told apart from it: {', '.join(row.name for row in rivals)}; time more prompts "
            "(--timed-prompts) before choosing between them."
        )
    return " ".join(words)


def _why_it_loses(row: Row, best: Row) -> str:
    said = (
        f"{row.name} is accepted more often ({row.acceptance:.3f} against {best.acceptance:.3f}) "
        f"and loses: it decodes at {row.over_plain:.2f}x"
    )
    if row.draft_step_ms <= best.draft_step_ms:
        return f"{said}."
    return (
        f"{said}, since it drafts a token in {row.draft_step_ms:.2f} ms against "
        f"{best.draft_step_ms:.2f}."
    )


# -- steps ----------------------------------------------------------------------------------------


def _try_apart(request: SweepRequest, combination: Combination) -> None:
    """In a process of its own: what one leaves in memory must not slow the next one."""
    if (request.out / combination.name / EVALUATION_FILE).exists():
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
        process.submit(try_one, request, combination).result()


def _report(request: SweepRequest) -> SweepReport:
    rows = [
        Row.of(combination, read_json(request.out / combination.name / EVALUATION_FILE))
        for combination in _measured(request.out)
    ]
    return SweepReport(rows=tuple(sorted(rows, key=lambda row: -row.over_plain)))


def _measured(out: Path) -> list[Combination]:
    """All that stand in the folder, also those that only an earlier command asked for."""
    every = {
        one.name: one
        for folder in out.glob("exit_*")
        if (found := _FOLDER_NAME.match(folder.name))
        for one in combinations([int(found[1])], get_args(HeadKind), "both")
    }
    return [one for name, one in sorted(every.items()) if (out / name / EVALUATION_FILE).exists()]


def _train_request(request: SweepRequest, combination: Combination) -> TrainRequest:
    return TrainRequest(
        model=request.machine.model,
        features=request.features,
        out=request.out / combination.name,
        checkpoints=request.out / "runs" / combination.name,
        exit_layer=combination.exit_layer,
        head=combination.head,
        draft_vocab=request.draft_vocab,
        reads_embedding=combination.reads_embedding,
        minutes=request.minutes_each,
        max_steps=request.max_steps,
        seed=request.seed,
        options=request.options,
    )


def _require_layers(request: SweepRequest) -> None:
    store = FeatureStore.of_target(request.features, request.machine.model)
    wanted = {combination.exit_layer for combination in request.combinations}
    missing = sorted(wanted.difference(store.manifest.exits))
    if missing:
        raise ConfigError(
            f"{request.features}: found states after layers {list(store.manifest.exits)}, none "
            f"after {missing}: collect with --exits {' '.join(str(n) for n in sorted(wanted))} "
            "(or --collect), or sweep over fewer layers"
        )


def _claim(request: SweepRequest) -> None:
    """One folder, one setting: figures of two settings must not stand in one table."""
    file = request.out / _ASKED_FILE
    asked = request.asked()
    if not file.exists():
        write_json(file, asked)
        return
    found = read_json(file)
    differing = [name for name, value in asked.items() if found.get(name) != value]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"{request.out}: was begun with {name} {found.get(name)!r}, now asked for "
            f"{asked[name]!r}: name another folder, or ask for the same (more exits and heads may "
            "be added)"
        )


def _digest(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(repr([prompt.tokens for prompt in prompts]).encode()).hexdigest()


def _mean(at: Sequence[Mapping[str, Any]], part: str, name: str, *, weight: str) -> float:
    """Over temperatures, each counting for as much as was seen of it."""
    total = sum(one[part][weight] for one in at)
    return float(sum(one[part][name] * one[part][weight] for one in at) / max(total, 1))


# -- words ----------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="eesd distill sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    collecting.add_flags(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the heads and of sweep.json")
    add("--features", type=Path, help="what `eesd distill collect` wrote (OUT/features)")
    add("--collect", action="store_true", help="collect the features of all exits first")
    add("--collect-minutes", type=float, help="begin no shard later than this")
    add("--exits", type=int, nargs="+", default=[1, 2, 4], help="layers to try")
    add("--heads", nargs="+", choices=get_args(HeadKind), default=["truncated"])
    add("--embedding", choices=get_args(Embedding), default="without", help="does the head read it")
    add("--draft-vocab", type=int, default=2048, help="tokens of a truncated head")
    add("--minutes-each", type=float, default=3.0, help="of training")
    add("--steps-each", type=int, help="of training, at most")
    add("--rate", type=float, default=TrainOptions().learning_rate, help="highest learning rate")
    add("--timed-prompts", type=int, default=12, help="at every temperature")
    add("--timed-tokens", type=int, default=96)
    words = parser.parse_args(argv)
    features = words.features or words.out / "features"
    if words.collect:
        wanted = collecting.request_of(words, out=features, exits=words.exits)
        collecting.collect(replace(wanted, minutes=words.collect_minutes), say=on_stderr)
    require_kept_aside(features, num_held_out=words.held_out, seed=words.seed)
    parts = read_prompts(words.model, words.prompts, num_held_out=words.held_out, seed=words.seed)
    request = SweepRequest(
        machine=Machine(
            model=words.model, head=words.out, dtype=words.dtype, threads=words.threads
        ),
        features=features,
        out=words.out,
        combinations=combinations(words.exits, words.heads, words.embedding),
        calibrated=parts.calibrated,
        judged=parts.judged,
        minutes_each=words.minutes_each,
        max_steps=words.steps_each,
        draft_vocab=words.draft_vocab,
        temperatures=tuple(words.temperatures),
        num_timed=words.timed_prompts,
        timed_tokens=words.timed_tokens,
        seed=words.seed,
        options=TrainOptions(learning_rate=words.rate),
    )
    report = sweep(request, say=on_stderr)
    sys.stdout.write(table(report) + "\n")
    return 0
