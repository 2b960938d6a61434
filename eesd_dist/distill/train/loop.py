"""The loop of a training run: steps, log, evaluations, checkpoints, and the head.

Every rank runs `train_rank`. After an interruption a run resumes from its last checkpoint with the
same results, bit for bit on the same machine with the same number of processes and threads; at ZeRO
stage 0 also with another number, which begins the pass over the features again. The loop decides
when a log row, evaluation or checkpoint is due; the learner updates the weights.
"""

import logging
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from eesd_dist.distill.folders import put_in_place
from eesd_dist.distill.train.batches import BatchReader, PlannedBatch
from eesd_dist.distill.train.held_out_rows import held_out_batches
from eesd_dist.distill.train.learner import Figures, HeadLearner, Progress
from eesd_dist.distill.train.learning_rate import LearningRate, Pace
from eesd_dist.distill.train.request import TrainInputs, TrainRequest, device_of
from eesd_dist.distill.train.run_folder import RunFolder
from eesd_dist.errors import ConfigError
from eesd_dist.progress import progress_bar
from eesd_dist.provenance import collect_provenance

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

logger = logging.getLogger(__name__)

_MEASURED = range(3, 13)
"""Steps that are timed to convert a budget to steps; the first ones are a warm-up."""
_CHECKPOINT = 1.0
_TIME_IS_OVER = 2.0
"""Also means that a checkpoint is due."""
_OTHERS_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
)
"""Warnings on torch functions that DeepSpeed uses; users cannot do anything about them."""


def train_rank(request: TrainRequest, *, rank: int, world_size: int) -> None:
    """Trains to the end, from the last checkpoint if there is one; called on every rank.

    Raises ConfigError for inconsistent options, before any step.
    """
    if world_size != request.workers:
        raise ConfigError(f"{world_size} processes for a run of {request.workers} workers")
    inputs = TrainInputs.of(request, device=device_of(request.options))
    folder = RunFolder(request.run_folder)
    if rank == 0:
        folder.claim(inputs.job(request))
    with warnings.catch_warnings():
        for message, category in _OTHERS_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        learner = HeadLearner(request, inputs, rank=rank, world_size=world_size)
        try:
            Run(request, inputs, folder, learner, rank=rank).to_the_end()
        finally:
            learner.close()


class Run:
    """Training loop of one rank."""

    def __init__(
        self,
        request: TrainRequest,
        inputs: TrainInputs,
        folder: RunFolder,
        learner: HeadLearner,
        *,
        rank: int,
    ) -> None:
        options = request.options
        self._request = request
        self._job = inputs.job(request)
        self._options = options
        self._folder = folder
        self._learner = learner
        self._is_writer = rank == 0
        self._recipe = collect_provenance(seed=request.seed).as_json() if rank == 0 else {}
        self._reader = BatchReader(
            inputs.store,
            exit_layer=request.exit_layer,
            only=inputs.learnt,
            shape=request.shape,
            seed=request.seed,
            window_bytes=options.window_mib * 2**20,
            rank=rank,
            num_ranks=request.workers,
            device=inputs.device,
        )
        self._held_out = held_out_batches(
            inputs.store,
            inputs.judged,
            request.exit_layer,
            shape=request.shape,
            rank=rank,
            num_ranks=request.workers,
        )
        self._progress = Progress()
        if request.max_steps is not None and (
            request.minutes is None or request.max_steps <= self._last_measured
        ):
            self._progress = Progress(total_steps=request.max_steps)
        self._began = time.monotonic()
        self._saved_at = self._began
        self._folder_step: int | None = None
        """Step of the checkpoint that was last written or read."""
        self._step_began = self._began
        self._step_s: list[float] = []
        """Seconds of each step, with reading its rows."""
        self._evaluation_s = 0.0

    def to_the_end(self) -> None:
        self._resume()
        with self._shown() as shown:
            if self._progress.step == 0:
                self._judge_before_training(shown)
            self._step_began = time.monotonic()
            for planned in self._reader.batches(self._progress.position):
                if self._progress.step == self._progress.total_steps:
                    break
                self._advance(planned, shown)
        if self._folder_step != self._progress.step:
            self._save()
        self._write_head()

    def _advance(self, planned: PlannedBatch, shown: "_Shown") -> None:
        """Takes one step, and does what is due after it."""
        step = self._progress.step + 1
        judges = self._is_due(step, self._options.evaluate_every) and bool(self._held_out)
        logs = judges or self._is_due(step, self._options.log_every)
        rate = self._rate.at(self._progress.step)
        figures, flag = self._learner.learn(
            planned, rate=rate, wants_figures=logs, flag=self._due_by_clock()
        )
        if self._progress.total_steps is None:
            self._learner.finish_work()
        self._move_to(step=step, position=planned.after)
        self._step_s.append(time.monotonic() - self._step_began)
        if flag >= _TIME_IS_OVER:
            self._move_to(total_steps=step)
            judges = bool(self._held_out)
        held_out = self._judge() if judges else None
        if figures is not None:
            shown.row(self._row(figures, rate, held_out))
        shown.moved(self._progress)
        if self._plan_is_due(step):
            self._plan()
            self._save()
        elif flag or self._is_due(step, self._options.checkpoint_every_steps):
            self._save()
        self._step_began = time.monotonic()

    def _resume(self) -> None:
        """Loads the last checkpoint, which the first rank determines, on all ranks."""
        latest_step = self._folder.latest_step() if self._is_writer else None
        coded = 0.0 if latest_step is None else latest_step + 1.0
        (coded,) = self._learner.sum_over_ranks([coded])
        step = int(coded) - 1
        if coded:
            self._progress = self._learner.load(self._folder.checkpoint(step))
            self._folder_step = step
            logger.info("goes on after step %d", step)
        if self._is_writer:
            self._folder.cut_log(after_step=step)
        self._began = time.monotonic() - self._progress.spent_s

    def _judge_before_training(self, shown: "_Shown") -> None:
        if not self._held_out:
            return
        began = time.monotonic()
        held_out = self._judge()
        self._evaluation_s = time.monotonic() - began
        shown.row({"step": 0, "seconds": self._seconds(), "held_out": asdict(held_out)})

    def _judge(self) -> Figures:
        held_out = self._learner.judge(self._held_out)
        self._progress = replace(self._progress, held_out=held_out)
        best = self._progress.best_one_minus_tv
        if self._options.keep == "best" and (best is None or held_out.one_minus_tv > best):
            self._progress = replace(
                self._progress,
                best_one_minus_tv=held_out.one_minus_tv,
                best_step=self._progress.step,
            )
            self._learner.save_head(self._folder.best, provenance=self._provenance())
        return held_out

    def _plan(self) -> None:
        """Converts the rest of the budget to steps, by the first rank's clock."""
        minutes = self._request.minutes
        if minutes is None:
            raise AssertionError("a run without a budget has a number of steps from the start")
        timed = self._step_s[_MEASURED.start :] or self._step_s
        pace = Pace(step_s=sum(timed) / len(timed), evaluation_s=self._evaluation_s)
        more = pace.steps_within(
            60.0 * minutes - self._seconds(), evaluation_period=self._options.evaluate_every
        )
        (more_f,) = self._learner.sum_over_ranks([float(more) if self._is_writer else 0.0])
        total = self._progress.step + max(int(more_f), 1)
        if self._request.max_steps is not None:
            total = min(total, self._request.max_steps)
        self._move_to(total_steps=total)
        logger.info("%.0f ms a step: %d steps in %.1f minutes", 1e3 * pace.step_s, total, minutes)

    def _plan_is_due(self, step: int) -> bool:
        return self._progress.total_steps is None and step >= self._last_measured

    @property
    def _last_measured(self) -> int:
        return min(_MEASURED.stop - 1, self._options.warmup_steps)

    def _save(self) -> None:
        step = self._progress.step
        self._move_to()
        self._learner.save(self._folder.unfinished(step), self._progress)
        if self._is_writer:
            self._folder.commit(step)
        self._learner.wait_for_all()
        self._folder_step = step
        self._saved_at = time.monotonic()

    def _write_head(self) -> None:
        request = self._request
        if self._options.keep == "last" or self._progress.best_step is None:
            self._learner.save_head(request.out, provenance=self._provenance())
        elif self._is_writer:
            written = request.out.with_name(f".{request.out.name}.new")
            shutil.copytree(self._folder.best, written, dirs_exist_ok=True)
            put_in_place(written, request.out)
        self._learner.wait_for_all()

    def _due_by_clock(self) -> float:
        """Returns on the first rank what its clock says is due after this step, or 0; 0 on other
        ranks, and before the number of steps is known."""
        if not self._is_writer or self._progress.total_steps is None:
            return 0.0
        minutes = self._request.minutes
        if minutes is not None and self._seconds() >= 60.0 * minutes:
            return _TIME_IS_OVER
        waited_s = time.monotonic() - self._saved_at
        return _CHECKPOINT if waited_s >= self._options.checkpoint_every_s else 0.0

    def _is_due(self, step: int, period: int | None) -> bool:
        return period is not None and (step % period == 0 or step == self._progress.total_steps)

    @property
    def _rate(self) -> LearningRate:
        warmup = self._options.warmup_steps
        if self._request.minutes is None and self._request.max_steps is not None:
            warmup = min(warmup, max(self._request.max_steps // 10, 1))
        return LearningRate(
            peak=self._options.learning_rate,
            warmup_steps=warmup,
            total_steps=self._progress.total_steps,
        )

    def _move_to(self, **changed: Any) -> None:
        self._progress = replace(self._progress, spent_s=self._seconds(), **changed)

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _row(self, figures: Figures, rate: float, held_out: Figures | None) -> dict[str, object]:
        row: dict[str, object] = {
            "step": self._progress.step,
            "seconds": round(self._progress.spent_s, 3),
            "lr": rate,
            **asdict(figures),
        }
        return row if held_out is None else {**row, "held_out": asdict(held_out)}

    def _provenance(self) -> dict[str, object]:
        progress = self._progress
        return {
            **self._recipe,
            "training": {
                **self._job,
                "step": progress.step,
                "total_steps": progress.total_steps,
                "seconds": self._seconds(),
                "held_out": None if progress.held_out is None else asdict(progress.held_out),
            },
        }

    @contextmanager
    def _shown(self) -> Iterator["_Shown"]:
        if not self._is_writer:
            yield _Hidden()
            return
        progress = self._progress
        with (
            _tensorboard(self._folder, purge_step=progress.step + 1) as board,
            progress_bar(
                title="train", initial=progress.step, total=progress.total_steps, unit="step"
            ) as bar,
        ):
            yield _Written(self._folder, board, bar)


@contextmanager
def _tensorboard(folder: RunFolder, *, purge_step: int) -> Iterator["SummaryWriter | None"]:
    """Opens a log for TensorBoard; None where that is not installed, as for serving."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield None
        return
    with closing(SummaryWriter(folder.tensorboard, purge_step=purge_step)) as board:
        yield board


class _Shown(Protocol):
    """Shows the progress of a run."""

    def row(self, row: Mapping[str, object]) -> None: ...
    def moved(self, progress: Progress) -> None: ...


class _Hidden:
    """Shows nothing; for all ranks but the first."""

    def row(self, row: Mapping[str, object]) -> None: ...
    def moved(self, progress: Progress) -> None: ...


class _Written:
    """Shows progress as JSON lines, in TensorBoard and as a progress bar."""

    def __init__(self, folder: RunFolder, board: "SummaryWriter | None", bar: "tqdm[Any]") -> None:
        self._folder = folder
        self._board = board
        self._bar = bar

    def row(self, row: Mapping[str, object]) -> None:
        self._folder.write_row(row)
        step = cast(int, row["step"])
        held_out = row.get("held_out")
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"train/{name}", value, step)
            if isinstance(held_out, dict):
                for name, value in held_out.items():
                    self._board.add_scalar(f"held_out/{name}", value, step)
        if isinstance(held_out, dict):
            self._bar.set_postfix(
                {name: f"{value:.3f}" for name, value in held_out.items()}, refresh=False
            )

    def moved(self, progress: Progress) -> None:
        self._bar.total = progress.total_steps
        self._bar.update(progress.step - self._bar.n)
