"""Alternates collecting and training, with a bounded size of features on disk.

The plan of the collection is divided into parts that fit into `max_gb`. A round collects one part,
trains the head of the previous round further on it, and the next round removes its features before
it collects. Each training has its own optimizer state, warm-up and held-out texts.

A finished round is marked by its head; after an interruption the first unfinished one continues.

    FOLDER/000/features, training, head    the first round
    FOLDER/001/...                         the last round's head is `training.out`
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from eesd_dist.distill.collect import CollectRequest, collect
from eesd_dist.distill.executor import Executor, Say
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.distill.train_head import train
from eesd_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Collection and training of one round."""

    folder: Path
    collection: CollectRequest
    training: TrainRequest

    @property
    def is_done(self) -> bool:
        return self.training.out.exists()

    def run(self, *, executor: Executor, say: Say) -> None:
        collect(self.collection, executor=executor, say=say)
        train(self.training, executor=executor)

    def keep_the_head_alone(self) -> None:
        for folder in (self.collection.out, self.training.run_folder):
            _remove(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """All rounds; minutes and steps of both requests are for all of them together."""

    folder: Path
    collection: CollectRequest
    training: TrainRequest
    count: int
    """Number of parts of the collection."""

    def __post_init__(self) -> None:
        steps = self.training.max_steps
        if steps is not None and steps < self.count:
            raise ConfigError(
                f"max_steps is {steps} for {self.count} rounds: allow at least one step a round, "
                "or raise max_gb"
            )

    def __iter__(self) -> Iterator[Round]:
        return map(self._round, range(self.count))

    def _round(self, number: int) -> Round:
        folder = self._folder(number)
        minutes = self.collection.minutes
        return Round(
            folder=folder,
            collection=replace(
                self.collection,
                out=folder / "features",
                part=number,
                minutes=None if minutes is None else minutes / self.count,
            ),
            training=self._training(number, folder),
        )

    def _training(self, number: int, folder: Path) -> TrainRequest:
        training, count = self.training, self.count
        is_last = number == count - 1
        minutes, steps, options = training.minutes, training.max_steps, training.options
        if steps is not None:
            steps = (number + 1) * steps // count - number * steps // count
        return replace(
            training,
            features=folder / "features",
            checkpoints=folder / "training",
            out=training.out if is_last else folder / "head",
            start=self._folder(number - 1) / "head" if number else training.start,
            minutes=None if minutes is None else minutes / count,
            max_steps=steps,
            # Rounding between the rounds would lose small updates.
            options=options if is_last else replace(options, save_dtype="float32"),
        )

    def _folder(self, number: int) -> Path:
        return self.folder / f"{number:03d}"


def collect_and_train(rounds: Rounds, *, executor: Executor, say: Say) -> None:
    """Runs all rounds that are not done. At any time one round's features are on disk.

    The last round's features remain, for another training or a sweep on them.
    """
    all_rounds = list(rounds)
    num_done = max(
        (number + 1 for number, round_ in enumerate(all_rounds) if round_.is_done), default=0
    )
    for number in range(num_done, len(all_rounds)):
        if number:
            all_rounds[number - 1].keep_the_head_alone()
        say(f"round {number + 1} of {len(all_rounds)}")
        all_rounds[number].run(executor=executor, say=say)
        for before in all_rounds[:number]:
            _remove(before.folder)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
