"""`eesd distill run`: from a target and prompts to a head that is trained, calibrated and judged.

    eesd distill run --model TARGET --out OUT --exit 1 [--prompts FILE.jsonl] [--minutes 16]

collect -> train -> calibrate -> evaluate. What is done is what is there: OUT/features with its
manifest, OUT/training with its checkpoints, then OUT/exit_N, and in it calibration.json and
evaluation.json. Killed at any moment, the same command goes on; with other options it is refused,
since half of the files would then mean something else. `--minutes` are shared out: two fifths
each for collecting and for training, and what calibrating and judging take. More training on less
text did worse: the head learnt that text by heart.
"""

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from eesd_dist.control.calibrator import CALIBRATION_FILE
from eesd_dist.distill.folders import only_one, write_json
from eesd_dist.distill.held_out import PromptParts, read_prompts
from eesd_dist.distill.rounds import Machine
from eesd_dist.distill.train.learner import TrainOptions, TrainRequest
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.head_config import HeadKind
from eesd_dist.model.spec import read_json
from serve_app.distill import collect as collecting
from serve_app.distill.calibrate import CalibrateRequest, calibrate
from serve_app.distill.collect import CollectRequest, collect, planned, recipe_of
from serve_app.distill.evaluate import EVALUATION_FILE, EvaluateRequest, evaluate
from serve_app.distill.train import train
from serve_app.distill.words import Say, on_stderr

RUN_FILE = "run.json"
DEFAULT_MINUTES = 16.0
_COLLECT_SHARE = 0.4
_TRAIN_SHARE = 0.4
_NUM_CALIBRATED = 32
_NUM_JUDGED = 32
_NUM_TIMED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One head, from the target on."""

    collect: CollectRequest
    """Its folder and minutes are the run's to set, and its one exit layer is the head's."""
    out: Path
    minutes: float = DEFAULT_MINUTES
    max_steps: int | None = None
    """Training ends after so many, if its minutes allow more."""
    head: HeadKind = "truncated"
    draft_vocab: int = 2048
    reads_embedding: bool = False
    start: Path | None = None
    """A head to train on."""
    train_workers: int = 1
    zero_stage: int = 0
    options: TrainOptions = field(default_factory=TrainOptions)

    @property
    def exit_layer(self) -> int:
        (exit_layer,) = self.collect.exits
        return exit_layer

    @property
    def head_folder(self) -> Path:
        return self.out / f"exit_{self.exit_layer}"

    @property
    def collection(self) -> CollectRequest:
        minutes = self.minutes * _COLLECT_SHARE
        return replace(self.collect, out=self.out / "features", minutes=minutes)

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
            reads_embedding=self.reads_embedding,
            minutes=self.minutes * _TRAIN_SHARE,
            max_steps=self.max_steps,
            workers=self.train_workers,
            zero_stage=self.zero_stage,
            start=self.start,
            seed=self.collect.seed,
            options=self.options,
        )

    def shortened(self, count: int) -> int:
        """Prompts to calibrate on or to judge with: fewer where there is little time."""
        return max(2, round(count * min(1.0, self.minutes / DEFAULT_MINUTES)))


def run(request: RunRequest, *, say: Say) -> Path:
    """The finished head's folder. Raises ConfigError when OUT is another run's."""
    request.out.mkdir(parents=True, exist_ok=True)
    with only_one(request.out):
        _claim(request)
        with _timed("collect", say):
            collect(request.collection, say=say)
        head = request.head_folder
        _step(head, "train", say, lambda: train(request.training, address=request.collect.address))
        machine = Machine(
            model=request.collect.model,
            head=head,
            dtype=request.collect.dtype,
            threads=request.collect.threads,
        )
        _step(head / CALIBRATION_FILE, "calibrate", say, lambda: _calibrate(request, machine, say))
        _step(head / EVALUATION_FILE, "evaluate", say, lambda: _evaluate(request, machine, say))
    say(f"run: the head is in {head}: eesd serve --model {request.collect.model} --head {head}")
    return head


def _calibrate(request: RunRequest, machine: Machine, say: Say) -> None:
    asked = request.collect
    parts = _parts(asked)
    calibrate(
        CalibrateRequest(
            machine=machine,
            prompts=parts.calibrated[: request.shortened(_NUM_CALIBRATED)],
            max_tokens=asked.max_tokens,
            seed=asked.seed,
        ),
        say=say,
    )


def _evaluate(request: RunRequest, machine: Machine, say: Say) -> None:
    asked = request.collect
    evaluate(
        EvaluateRequest(
            machine=machine,
            prompts=_parts(asked).judged[: request.shortened(_NUM_JUDGED)],
            max_tokens=min(asked.max_tokens, 128),
            num_timed=request.shortened(_NUM_TIMED),
            timed_tokens=min(asked.max_tokens, 96),
            seed=asked.seed,
        ),
        say=say,
    )


def _parts(asked: CollectRequest) -> PromptParts:
    if asked.prompts is None:
        raise ConfigError("no prompts: a head is calibrated and judged on some that are kept aside")
    return read_prompts(
        asked.model, asked.prompts, num_held_out=asked.num_held_out, seed=asked.seed
    )


def _step(result: Path, name: str, say: Say, work: Callable[[], object]) -> None:
    """Does what has left no result yet."""
    if result.exists():
        say(f"{name}: done before, {result}")
        return
    with _timed(name, say):
        work()


@contextmanager
def _timed(name: str, say: Say) -> Iterator[None]:
    began = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - began:.0f} s")


# -- what was asked -------------------------------------------------------------------------------


def _claim(request: RunRequest) -> None:
    """Writes down what is asked, or holds it against what was asked here before."""
    file = request.out / RUN_FILE
    wanted = asked_of(request)
    if not file.exists():
        # A folder that was claimed for prompts that are of no use would refuse the mended ones.
        _parts(request.collect)
        planned(request.collection, recipe_of(request.collection), say=lambda _: None)
        write_json(file, wanted)
        return
    found = read_json(file)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise CheckpointError(
                file=file,
                found=f"a run with {name} {found.get(name)!r}",
                expected=f"{wanted.get(name)!r}, as asked for now",
                advice="ask for the same to go on with it, or name another folder with --out",
            )


def asked_of(request: RunRequest) -> dict[str, object]:
    """All that decides what the files of a run mean; not how many processes work at it."""
    asked = request.collect
    recipe = recipe_of(request.collection)
    training = request.training.job()
    for name in ("model", "features", "exit_layer", "minutes", "seed"):
        training.pop(name)
    return {
        "target": recipe.verifier.sha256,
        "weights": recipe.weights_sha256,
        "exit": request.exit_layer,
        "minutes": request.minutes,
        "seed": asked.seed,
        "prompts": None if asked.prompts is None else _sha256(asked.prompts),
        "text": None if asked.text is None else _sha256(asked.text),
        "limit": asked.limit,
        "held_out": asked.num_held_out,
        "temperatures": list(asked.temperatures),
        "passes": asked.passes,
        "max_tokens": asked.max_tokens,
        "max_length": recipe.max_length,
        "top_k": recipe.top_k,
        "chunk_size": asked.chunk_size,
        "dtype": asked.dtype,
        "training": training,
    }


def _sha256(file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file, expected JSON lines")
    return hashlib.sha256(file.read_bytes()).hexdigest()


# -- words ----------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="eesd distill run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = TrainOptions()
    collecting.add_flags(parser)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of everything")
    add("--exit", type=int, default=1, help="the head reads the state after so many layers")
    add("--minutes", type=float, default=DEFAULT_MINUTES, help="for all four steps, about")
    add("--max-steps", type=int, help="train no longer than this")
    add("--head", choices=get_args(HeadKind), default="truncated", help="whose LM head")
    add("--draft-vocab", type=int, default=2048, help="tokens of a truncated head")
    add("--reads-embedding", action="store_true", help="the head also sees each token's embedding")
    add("--start", type=Path, help="a head to train on")
    add("--train-workers", type=int, default=1, help="processes that train")
    add("--zero-stage", type=int, default=0, help="0 to 3: what DeepSpeed partitions")
    add("--offload-optimizer", action="store_true", help="its state in host memory")
    add("--bfloat16", action="store_true", help="train in it, on machines that compute in it")
    add("--rows", type=int, default=default.rows, help="of one training step")
    add("--length", type=int, default=default.length, help="tokens of such a row, at most")
    add("--rate", type=float, default=default.learning_rate, help="highest learning rate")
    words = parser.parse_args(argv)
    request = RunRequest(
        collect=collecting.request_of(words, out=words.out, exits=[words.exit]),
        out=words.out,
        minutes=words.minutes,
        max_steps=words.max_steps,
        head=words.head,
        draft_vocab=words.draft_vocab,
        reads_embedding=words.reads_embedding,
        start=words.start,
        train_workers=words.train_workers,
        zero_stage=words.zero_stage,
        options=replace(
            default,
            rows=words.rows,
            length=words.length,
            learning_rate=words.rate,
            offload_optimizer=words.offload_optimizer,
            bfloat16=words.bfloat16,
        ),
    )
    if words.minutes <= 0:
        raise ConfigError(f"--minutes {words.minutes}: expected a time to spend")
    run(request, say=on_stderr)
    return 0
