"""`eesd distill run`: makes a trained, calibrated and evaluated head from a target and prompts.

collect -> train -> calibrate -> evaluate. Existing files mark finished steps: OUT/features with its
manifest, OUT/training with its checkpoints, then OUT/exit_N, and in it calibration.json and
evaluation.json. After an interruption the same command continues; other options are refused, since
the files would be inconsistent. `--minutes` are split: two fifths each for collecting and for
training, the rest for calibration and evaluation. More training on less text was worse, by
overfitting. With `--ring` collecting and training alternate (`ring`), each with its part of the
minutes.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from eesd_dist.checks import require_positive
from eesd_dist.control.calibrator import CALIBRATION_FILE
from eesd_dist.distill.answers import Machine
from eesd_dist.distill.calibrate import CalibrateOptions, calibrate
from eesd_dist.distill.collect import CollectOptions, CollectRequest, collect, planned_parts
from eesd_dist.distill.evaluate import EVALUATION_FILE, EvaluateOptions, evaluate
from eesd_dist.distill.executor import Executor, Say
from eesd_dist.distill.folders import only_one, require_same, write_json
from eesd_dist.distill.held_out import PromptParts
from eesd_dist.distill.ring import Rounds, collect_and_train
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.distill.train_head import train
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.text.prompts import Prompt

RUN_FILE = "run.json"
DEFAULT_MINUTES = 16.0
_COLLECT_SHARE = 0.4
_TRAIN_SHARE = 0.4
_NUM_CALIBRATED = 32
_NUM_JUDGED = 32
_NUM_TIMED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """Training of one head, and its prompts for calibration and evaluation."""

    training: TrainRequest
    machine: Machine
    calibrated: tuple[Prompt, ...]
    calibration: CalibrateOptions
    judged: tuple[Prompt, ...]
    """Prompts for evaluation, used neither for training nor for calibration."""
    evaluation: EvaluateOptions


def make_head(request: HeadRequest, *, executor: Executor, say: Say) -> Path:
    """Trains, calibrates and evaluates; steps with existing files are skipped."""
    machine, seed = request.machine, request.training.seed
    steps: tuple[tuple[str, Path, Callable[..., object]], ...] = (
        ("train", machine.head, partial(train, request.training)),
        (
            "calibrate",
            machine.head / CALIBRATION_FILE,
            partial(
                calibrate, machine, request.calibrated, request.calibration, seed=seed, say=say
            ),
        ),
        (
            "evaluate",
            machine.head / EVALUATION_FILE,
            partial(evaluate, machine, request.judged, request.evaluation, seed=seed, say=say),
        ),
    )
    for name, result, step in steps:
        if result.exists():
            say(f"{name}: done before, {result}")
            continue
        with _timed(name, say):
            step(executor=executor)
    return machine.head


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Options of a run of all four steps."""

    collect: CollectOptions
    out: Annotated[Path, "output folder of all steps"]
    exit_layer: Annotated[int, "--exit: the head reads the state after this many layers"] = 1
    minutes: Annotated[float, "approximate time of all four steps"] = DEFAULT_MINUTES
    max_steps: Annotated[int | None, "maximum training steps"] = None
    head: Annotated[HeadKind, "kind of LM head"] = "truncated"
    draft_vocab: Annotated[int, "tokens of a truncated head"] = 2048
    start: Annotated[Path | None, "a head to train further"] = None
    train_workers: Annotated[int, "training processes"] = 1
    zero_stage: Annotated[int, "0 to 3: what DeepSpeed partitions"] = 0
    ring: Annotated[
        bool, "collect and train alternately, with at most --max-gb of features at a time"
    ] = False
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        require_positive(self, "minutes")
        if self.ring and self.collect.max_gb is None:
            raise ConfigError("ring is set without max_gb: set the size of the features on disk")

    @property
    def head_folder(self) -> Path:
        return self.out / f"exit_{self.exit_layer}"

    @property
    def collection(self) -> CollectRequest:
        return CollectRequest(
            options=self.collect,
            out=self.out / "features",
            exits=(self.exit_layer,),
            minutes=self.minutes * _COLLECT_SHARE,
        )

    @property
    def training(self) -> TrainRequest:
        return TrainRequest(
            model=self.collect.model,
            features=self.out / "features",
            out=self.head_folder,
            checkpoints=self.out / "training",
            exit_layer=self.exit_layer,
            head=self.head,
            draft_vocab=self.draft_vocab,
            minutes=self.minutes * _TRAIN_SHARE,
            max_steps=self.max_steps,
            workers=self.train_workers,
            zero_stage=self.zero_stage,
            start=self.start,
            seed=self.collect.seed,
            options=self.options,
        )

    def rounds(self) -> Rounds:
        """Reads the prompts, and returns the rounds of a ring."""
        collection = self.collection
        portions = planned_parts(self.collect, collection.recipe(), say=lambda _: None)
        return Rounds(
            folder=self.out / "rounds",
            collection=collection,
            training=self.training,
            count=len(portions),
        )

    def head_request(self) -> HeadRequest:
        return self.head_request_of(self.collect.prompt_choice().read(self.collect.model))

    def head_request_of(self, split: PromptParts) -> HeadRequest:
        options = self.collect
        return HeadRequest(
            training=self.training,
            machine=Machine(
                model=options.model,
                head=self.head_folder,
                dtype=options.dtype,
                threads=options.threads,
            ),
            calibrated=split.calibrated[: self.shortened(_NUM_CALIBRATED)],
            calibration=CalibrateOptions(max_tokens=options.max_tokens),
            judged=split.judged[: self.shortened(_NUM_JUDGED)],
            evaluation=EvaluateOptions(
                max_tokens=min(options.max_tokens, 128),
                timed_prompts=self.shortened(_NUM_TIMED),
                timed_tokens=min(options.max_tokens, 96),
            ),
        )

    def shortened(self, count: int) -> int:
        """Returns the number of prompts to calibrate or evaluate on, reduced for short runs."""
        return max(2, round(count * min(1.0, self.minutes / DEFAULT_MINUTES)))

    def settings(self) -> dict[str, object]:
        """Returns the options that determine the files of a run; not the number of processes."""
        options, recipe = self.collect, self.collection.recipe()
        training = self.training.job()
        for name in ("model", "features", "exit_layer", "minutes", "seed"):
            training.pop(name)
        return {
            "target": recipe.verifier.sha256,
            "weights": recipe.weights_sha256,
            "exit": self.exit_layer,
            "minutes": self.minutes,
            "seed": options.seed,
            "prompts": None if options.text_only else _sha256(options.prompts),
            "text": None if options.text is None else _sha256(options.text),
            "limit": options.limit,
            "held_out": options.held_out,
            "temperatures": list(options.temperatures),
            "passes": options.passes,
            "max_tokens": options.max_tokens,
            "max_length": recipe.max_length,
            "top_k": recipe.top_k,
            "chunk_size": options.chunk_size,
            "max_gb": options.max_gb,
            "ring": self.ring,
            "dtype": options.dtype,
            "training": training,
        }


def run(request: RunRequest, *, executor: Executor, say: Say) -> Path:
    """Returns the finished head's folder. Raises ConfigError if OUT belongs to another run."""
    with only_one(request.out):
        _claim(request)
        if request.ring:
            with _timed("rounds", say):
                collect_and_train(request.rounds(), executor=executor, say=say)
        else:
            with _timed("collect", say):
                collect(request.collection, executor=executor, say=say)
        head = make_head(request.head_request(), executor=executor, say=say)
    say(f"run: the head is in {head}: eesd serve --model {request.collect.model} --head {head}")
    return head


def _claim(request: RunRequest) -> None:
    """Stores the request, or compares it with the stored one."""
    file, settings = request.out / RUN_FILE, request.settings()
    if file.exists():
        require_same(file, settings)
        return
    # Checked before claiming: a folder claimed with unusable prompts would refuse corrected ones.
    request.collect.prompt_choice()
    planned_parts(request.collect, request.collection.recipe(), say=lambda _: None)
    if request.ring:
        request.rounds()
    write_json(file, settings)


@contextmanager
def _timed(name: str, say: Say) -> Iterator[None]:
    began = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - began:.0f} s")


def _sha256(file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file, expected JSON lines")
    return hashlib.sha256(file.read_bytes()).hexdigest()
