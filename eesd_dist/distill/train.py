"""Trains one exit head to say what the frozen target will say, on one rank or on many.

DeepSpeed moves gradients and optimizer state (ZeRO stages 0 to 3); only the head's own parameters
are trained, and every rank runs `train_rank`, which does the same in all of them. What a run has
done is in its folder: killed at any moment and started again it goes on from its last checkpoint
along the same curve, bit for bit on the same machine with as many processes and threads.

It knows the features or the target, never Ray, text or an engine. Whoever calls it has made the
default process group (`alone` makes one for a single process).
"""

# Shapes: B rows, T positions, D hidden size, N = B x T positions, K tokens kept, V vocabulary.

import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from eesd_dist.config import DType
from eesd_dist.distill.batches import (
    Batch,
    BatchReader,
    BatchShape,
    PlannedBatch,
    Position,
    Row,
    in_order,
    read_rows,
)
from eesd_dist.distill.features import FeatureStore, identity_of
from eesd_dist.distill.losses import Comparison, DraftVocabulary, KeptTargets, LossOptions
from eesd_dist.distill.run_folder import RunFolder, put_in_place
from eesd_dist.distill.schedule import LearningRate, Pace
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.errors import ConfigError
from eesd_dist.model.exit_head import TrainableExitHead
from eesd_dist.model.head_config import HeadKind
from eesd_dist.model.span import EMBEDDING
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import Checkpoint
from eesd_dist.provenance import collect_provenance

logger = logging.getLogger(__name__)

_MEASURED = range(3, 13)
"""Steps whose time says how many fit into a budget; the first ones still warm up the machine."""


_OTHERS_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
)
"""What DeepSpeed uses of torch and will have to stop using: nothing the reader can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a head is trained. The defaults fit a small model on a CPU."""

    rows: int = 16
    """Rows of one optimizer step, over all workers and accumulated micro-batches."""
    length: int = 256
    """Tokens of a row, at most."""
    accumulation: int = 1
    """Micro-batches a step."""
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of a gradient."""
    loss: LossOptions = field(default_factory=LossOptions)
    prompt_weight: float = 1.0
    """What a position within a prompt weighs against one that the target wrote."""
    source: Literal["features", "live"] = "features"
    """`live`: only the store's tokens are used, and the target runs at every step."""
    held_out_share: float = 0.1
    """Of the store's sequences: judged on, never learnt from."""
    held_out_sequences: int = 64
    """So many of them are judged, at most."""
    evaluate_every: int = 200
    log_every: int = 10
    checkpoint_every_s: float = 60.0
    checkpoint_every_steps: int | None = None
    """Beside the seconds."""
    keep: Literal["best", "last"] = "best"
    """`best`: the head that rejection sampling accepts most of, on held-out text."""
    offload_optimizer: bool = False
    """Optimizer state in host memory; with ZeRO stages 1 to 3."""
    bfloat16: bool = False
    """Train in bfloat16 with float32 master weights; wants a machine that computes in it."""
    save_dtype: DType = "bfloat16"
    threads: int | None = None
    """CPU threads of one worker; None shares the machine out evenly."""
    window_mib: int = 2048
    """Features in memory at a time, per worker."""
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        for name in ("rows", "length", "accumulation", "warmup_steps", "evaluate_every"):
            _require_positive(name, getattr(self, name))
        for name in ("log_every", "learning_rate", "clip", "checkpoint_every_s", "window_mib"):
            _require_positive(name, getattr(self, name))
        for name in ("checkpoint_every_steps", "threads"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not 0.0 <= self.held_out_share < 1.0:
            raise ConfigError(f"held_out_share is {self.held_out_share}: from 0 up to, not with, 1")
        if self.prompt_weight < 0.0 or self.weight_decay < 0.0:
            raise ConfigError("prompt_weight and weight_decay must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One head to train, from which target and features, and where everything goes."""

    model: Path
    """Folder of the target."""
    features: Path
    out: Path
    """Folder of the head; written when training has ended."""
    checkpoints: Path
    """Folder of the run: checkpoints, log, TensorBoard. With several nodes, one that all see."""
    exit_layer: int
    head: HeadKind = "truncated"
    draft_vocab: int = 2048
    """Tokens of a truncated head."""
    reads_embedding: bool = False
    """Whether the head also sees the embedding of each position's own token (arXiv 2404.19124)."""
    minutes: float | None = None
    max_steps: int | None = None
    workers: int = 1
    zero_stage: int = 0
    start: Path | None = None
    """A head to train on; None begins with the target's last layer."""
    seed: int = 0
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        if self.minutes is None and self.max_steps is None:
            raise ConfigError("neither minutes nor max_steps: say when training is to end")
        if self.minutes is not None:
            _require_positive("minutes", self.minutes)
        if self.max_steps is not None:
            _require_positive("max_steps", self.max_steps)
        _require_positive("workers", self.workers)
        _require_positive("draft_vocab", self.draft_vocab)
        if self.zero_stage not in range(4):
            raise ConfigError(f"zero_stage is {self.zero_stage}: DeepSpeed has 0, 1, 2 and 3")
        if self.options.offload_optimizer and self.zero_stage == 0:
            raise ConfigError(
                "offload_optimizer at ZeRO stage 0: nothing is partitioned there; take zero_stage "
                "1, 2 or 3, or leave it off"
            )
        _ = self.shape

    @property
    def shape(self) -> BatchShape:
        options = self.options
        shares = self.workers * options.accumulation
        return BatchShape(rows=options.rows, length=options.length, num_shares=shares)

    def job(self) -> dict[str, object]:
        """What may not change while a run goes on."""
        said = asdict(self)
        said["options"] = {
            name: value for name, value in said["options"].items() if name not in _MAY_CHANGE
        }
        for name in ("out", "checkpoints"):
            del said[name]
        if self.zero_stage == 0:  # the optimizer's state is whole, whoever reads it
            del said["workers"]
        return {name: str(v) if isinstance(v, Path) else v for name, v in said.items()}


_MAY_CHANGE = frozenset(
    {"log_every", "checkpoint_every_s", "checkpoint_every_steps", "threads", "device", "keep"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How well a head says what the target says, over some positions."""

    loss: float
    agreement: float
    """Share of positions where both put the same token first."""
    one_minus_tv: float
    """What rejection sampling would accept at temperature 1, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; what a checkpoint holds beside DeepSpeed's own state."""

    step: int = 0
    """Optimizer steps taken."""
    spent_s: float = 0.0
    total_steps: int | None = None
    """None until a budget in minutes has been turned into steps."""
    position: Position = field(default_factory=Position)
    held_out: Figures | None = None
    """Of the last evaluation."""
    best_one_minus_tv: float | None = None
    best_step: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        said = json.loads(text)
        if said["held_out"] is not None:
            said["held_out"] = Figures(**said["held_out"])
        return cls(**{**said, "position": Position(**said["position"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """What came of a run."""

    steps: int
    seconds: float
    best_step: int | None
    held_out: Figures | None
    """Of the last step."""


def train_rank(request: TrainRequest, *, rank: int, world_size: int) -> TrainSummary:
    """Trains to the end, from the last checkpoint if there is one; the same call in every rank.

    Raises ConfigError for what does not fit together, before any step is taken.
    """
    if world_size != request.workers:
        raise ConfigError(f"{world_size} processes for a run of {request.workers} workers")
    setting = _Setting.of(request)
    folder = RunFolder(request.checkpoints)
    if rank == 0:
        folder.claim(request.job())
    with warnings.catch_warnings():
        for message, category in _OTHERS_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        learner = _Learner(request, setting, rank=rank, world_size=world_size)
        try:
            return _Run(request, setting, folder, learner, is_writer=rank == 0).to_the_end()
        finally:
            learner.close()


@contextmanager
def alone(options: TrainOptions) -> Iterator[None]:
    """A default process group of this one process, without which DeepSpeed will not start."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    on_cuda = _device(options).type == "cuda"
    deepspeed = _deepspeed(force_cpu=not on_cuda)
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        else:
            dist.destroy_process_group()
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def draft_tokens(store: FeatureStore, only: Sequence[int], *, count: int) -> Tensor:
    """A truncated vocabulary, ascending: the tokens that the target wrote most often; where those
    are too few, the most frequent ones of the prompts."""
    vocab_size = store.manifest.verifier.vocab_size
    written_W = torch.zeros(vocab_size, dtype=torch.long)
    given_W = torch.zeros(vocab_size, dtype=torch.long)
    for sequence in store.sequences(only):
        prompt_T, answer_T = sequence.tokens_T.tensor_split([sequence.num_prompt])
        written_W += torch.bincount(answer_T, minlength=vocab_size)
        given_W += torch.bincount(prompt_T, minlength=vocab_size)
    score_W = written_W * (given_W.sum() + 1) + given_W
    order_W = score_W.argsort(descending=True, stable=True)
    return order_W[: min(count, vocab_size)].sort().values


# -- what a run works with ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """Everything that is read before the first step; the same in every rank."""

    spec: ModelSpec
    store: FeatureStore
    learnt: tuple[int, ...]
    judged: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, request: TrainRequest) -> "_Setting":
        options = request.options
        store = FeatureStore.open(request.features, expect=identity_of(request.model))
        learnt, held_out = store.split(options.held_out_share, request.seed)
        device = _device(options)
        if options.bfloat16:
            _require_bfloat16(device)
        return cls(
            spec=ModelSpec.from_folder(request.model),
            store=store,
            learnt=learnt,
            judged=held_out[: options.held_out_sequences],
            device=device,
        )


class _Source(Protocol):
    """Where hidden states and targets of a batch come from."""

    def features(self, batch: Batch) -> tuple[Tensor, KeptTargets]: ...


class _Cached:
    """As they were collected."""

    def features(self, batch: Batch) -> tuple[Tensor, KeptTargets]:
        return batch.hidden_BTD, batch.kept


class _Live:
    """From the frozen target, now: over each row as if it were a whole text, all logits kept."""

    def __init__(self, request: TrainRequest, setting: _Setting) -> None:
        self._exit_layer = request.exit_layer
        self._target = FrozenTarget(
            request.model, setting.spec, [request.exit_layer], device=setting.device
        )

    def features(self, batch: Batch) -> tuple[Tensor, KeptTargets]:
        hidden, logits_BTV = self._target.forward(batch.tokens_BT, [self._exit_layer])
        return hidden[self._exit_layer], KeptTargets.whole(logits_BTV.flatten(0, 1))


class _HeadLoss(nn.Module):
    """One forward pass as DeepSpeed sees it. ZeRO-3 gathers all of its parameters at once: they
    are one layer, and the layer takes them without a module's call of its own."""

    def __init__(self, head: TrainableExitHead, vocabulary: DraftVocabulary, loss: LossOptions):
        super().__init__()
        self.head = head
        self._vocabulary = vocabulary
        self._loss = loss

    def forward(
        self,
        hidden_BTD: Tensor,
        embedding_BTD: Tensor | None,
        ids_NK: Tensor,
        logits_NK: Tensor,
        lse_N: Tensor,
        weights_N: Tensor,
        wants_figures: bool,
    ) -> tuple[Tensor, Tensor]:
        """Sums over positions: the loss, and [loss, agreement, 1 - TV, weight] for the log."""
        guess_BTV = self.head.training_forward(hidden_BTD, embedding_BTD)
        kept = KeptTargets(ids_NK=ids_NK, logits_NK=logits_NK, lse_N=lse_N)
        comparison = Comparison(guess_BTV.flatten(0, 1), kept, self._vocabulary)
        loss = (comparison.loss(self._loss) * weights_N).sum()
        if not wants_figures:
            return loss, torch.zeros(4, dtype=torch.float64, device=loss.device)
        with torch.no_grad():
            sums = [
                loss,
                (comparison.agrees() * weights_N).sum(),
                (comparison.one_minus_tv() * weights_N).sum(),
                weights_N.sum(),
            ]
            return loss, torch.stack([x.double() for x in sums])


class _Learner:
    """The head under DeepSpeed's engine: learns from batches, judges, saves and loads."""

    def __init__(
        self, request: TrainRequest, setting: _Setting, *, rank: int, world_size: int
    ) -> None:
        deepspeed = _deepspeed(force_cpu=setting.device.type == "cpu")
        options = request.options
        head = _head(request, setting).to(setting.device)
        vocabulary = DraftVocabulary(
            head.vocab_ids, vocab_size=setting.spec.vocab_size, device=setting.device
        )
        module = _HeadLoss(head, vocabulary, options.loss)
        if request.zero_stage == 3:
            deepspeed.utils.set_z3_leaf_modules(module, [_HeadLoss])
        trained = [p for p in head.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained,
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._deepspeed = deepspeed
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=trained,
            optimizer=optimizer,
            config=_deepspeed_config(request),
        )
        self._head = head
        self._embedding_WD = _embedding(request, setting) if head.reads_embedding else None
        self._source: _Source = _Live(request, setting) if options.source == "live" else _Cached()
        self._options = options
        self._device = setting.device
        self._rank = rank
        self._world_size = world_size

    def learn(
        self, planned: PlannedBatch, *, rate: float, wants_figures: bool, flag: float
    ) -> tuple[Figures | None, float]:
        """One optimizer step. With `wants_figures` all ranks put theirs together, and learn what
        the first rank's `flag` was."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        options = self._options
        num_shares = self._world_size * options.accumulation
        # DeepSpeed divides by the micro-batches and averages over the ranks.
        scale = num_shares / planned.weight(options.prompt_weight)
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        for micro in range(options.accumulation):
            rows = planned.share(micro * self._world_size + self._rank, num_shares)
            loss, part = self._forward(rows, options.prompt_weight, wants_figures=wants_figures)
            self._engine.backward(loss * scale)
            self._engine.step()
            sums += part
        if not wants_figures:
            return None, 0.0
        *together, flag = self.sum_over_ranks([*sums.tolist(), flag])
        return _figures(together), flag

    def judge(self, batches: Sequence[Sequence[Row]]) -> Figures:
        """Over what the target wrote in these rows; prompts are not judged."""
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        self._engine.eval()
        with torch.no_grad():
            for rows in batches:
                mine = rows[self._rank :: self._world_size]
                # ZeRO-3 gathers in every forward pass: all ranks make equally many of them.
                _, part = self._forward(mine or rows[:1], 0.0, wants_figures=True)
                if mine:
                    sums += part
        self._engine.train()
        return _figures(self.sum_over_ranks(sums.tolist()))

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self._world_size > 1:
            self._deepspeed.comm.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def save(self, folder: Path, progress: Progress) -> None:
        """All ranks write their part into one folder."""
        self._engine.save_checkpoint(
            str(folder.parent),
            tag=folder.name,
            client_state={"progress": progress.to_json()},
            save_latest=False,
            exclude_frozen_parameters=True,
        )

    def load(self, folder: Path) -> Progress:
        _, client_state = self._engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=False
        )
        return Progress.from_json(client_state["progress"])

    def save_head(self, final: Path, *, provenance: Mapping[str, object]) -> None:
        """Puts the head as it now is in place of whatever stands there."""
        parameters = list(self._head.parameters())
        with self._deepspeed.zero.GatheredParameters(parameters, enabled=self._is_partitioned):
            if self._rank == 0:
                written = final.with_name(f".{final.name}.new")
                self._head.save(written, dtype=self._options.save_dtype, provenance=provenance)
                put_in_place(written, final)

    def wait_for_all(self) -> None:
        if self._world_size > 1:
            self._deepspeed.comm.barrier()

    def close(self) -> None:
        self._engine.destroy()

    @property
    def _is_partitioned(self) -> bool:
        return bool(self._engine.zero_optimization_partition_weights())

    def _forward(
        self, rows: Sequence[Row], prompt_weight: float, *, wants_figures: bool
    ) -> tuple[Tensor, Tensor]:
        batch = Batch.of(rows, prompt_weight=prompt_weight, device=self._device)
        hidden_BTD, kept = self._source.features(batch)
        embedding_BTD = None
        if self._embedding_WD is not None:
            embedding_BTD = functional.embedding(batch.tokens_BT, self._embedding_WD)
        if self._is_partitioned and torch.is_grad_enabled():
            # ZeRO-3 lets go of the parameters when the gradient of an input is there; without one
            # it would let go of them before the backward pass.
            hidden_BTD = hidden_BTD.detach().requires_grad_()
        loss, sums = self._engine(
            hidden_BTD,
            embedding_BTD,
            kept.ids_NK,
            kept.logits_NK,
            kept.lse_N,
            batch.weights_BT.flatten(),
            wants_figures,
        )
        return loss, sums


class _Run:
    """The steps of a run, and what is kept of them."""

    def __init__(
        self,
        request: TrainRequest,
        setting: _Setting,
        folder: RunFolder,
        learner: _Learner,
        *,
        is_writer: bool,
    ) -> None:
        options = request.options
        self._request = request
        self._options = options
        self._folder = folder
        self._learner = learner
        self._is_writer = is_writer
        self._reader = BatchReader(
            setting.store,
            exit_layer=request.exit_layer,
            only=setting.learnt,
            shape=request.shape,
            seed=request.seed,
            window_bytes=options.window_mib * 2**20,
        )
        held_out = read_rows(
            setting.store, setting.judged, request.exit_layer, length=options.length
        )
        self._held_out = in_order(held_out, options.rows)
        self._progress = Progress()
        if request.max_steps is not None and (
            request.minutes is None or request.max_steps <= self._last_measured
        ):
            self._progress = Progress(total_steps=request.max_steps)
        self._began = time.monotonic()
        self._saved_at = self._began
        self._folder_step: int | None = None
        """Of the checkpoint that was written or read last."""
        self._step_s: list[float] = []
        self._evaluation_s = 0.0

    def to_the_end(self) -> TrainSummary:
        self._resume()
        with self._shown() as shown:
            if self._progress.step == 0:
                self._judge_before_training(shown)
            for planned in self._reader.batches(self._progress.position):
                if self._progress.step == self._progress.total_steps:
                    break
                self._advance(planned, shown)
        if self._folder_step != self._progress.step:
            self._save()
        self._write_head()
        progress = self._progress
        return TrainSummary(
            steps=progress.step,
            seconds=progress.spent_s,
            best_step=progress.best_step,
            held_out=progress.held_out,
        )

    def _advance(self, planned: PlannedBatch, shown: "_Shown") -> None:
        """One step, and what is due after it."""
        began = time.monotonic()
        step = self._progress.step + 1
        judges = self._is_due(step, self._options.evaluate_every) and bool(self._held_out)
        logs = judges or self._is_due(step, self._options.log_every)
        rate = self._rate.at(self._progress.step)
        figures, wants_saving = self._learner.learn(
            planned, rate=rate, wants_figures=logs, flag=self._time_to_save()
        )
        self._move_to(step=step, position=planned.after)
        self._step_s.append(time.monotonic() - began)
        held_out = self._judge() if judges else None
        if figures is not None:
            shown.row(self._row(figures, rate, held_out))
        shown.moved(self._progress)
        if self._plan_is_due(step):
            self._plan()
            self._save()
        elif wants_saving or self._is_due(step, self._options.checkpoint_every_steps):
            self._save()

    def _resume(self) -> None:
        """The first rank looks which checkpoint is the last, and all load that one."""
        found = self._folder.latest_step() if self._is_writer else None
        coded = 0.0 if found is None else found + 1.0
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
        """Turns what is left of the budget into steps, by the first rank's clock."""
        minutes = self._request.minutes
        if minutes is None:
            raise AssertionError("a run without a budget has its number of steps from the start")
        timed = self._step_s[_MEASURED.start :] or self._step_s
        pace = Pace(step_s=sum(timed) / len(timed), evaluation_s=self._evaluation_s)
        more = pace.steps_within(
            60.0 * minutes - self._seconds(), evaluate_every=self._options.evaluate_every
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

    def _time_to_save(self) -> float:
        """1 from the first rank when its clock says so; the others have no say."""
        waited_s = time.monotonic() - self._saved_at
        plans_first = self._progress.total_steps is None
        is_time = self._is_writer and not plans_first
        return float(is_time and waited_s >= self._options.checkpoint_every_s)

    def _is_due(self, step: int, every: int | None) -> bool:
        return every is not None and (step % every == 0 or step == self._progress.total_steps)

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
            **collect_provenance(seed=self._request.seed).as_json(),
            "training": {
                **self._request.job(),
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
            closing(SummaryWriter(self._folder.tensorboard, purge_step=progress.step + 1)) as board,
            tqdm(
                initial=progress.step, total=progress.total_steps, unit="step", disable=None
            ) as bar,
        ):
            yield _Written(self._folder, board, bar)


class _Shown(Protocol):
    """Where people look while a run goes on."""

    def row(self, row: Mapping[str, object]) -> None: ...
    def moved(self, progress: Progress) -> None: ...


class _Hidden:
    """Of all ranks but the first."""

    def row(self, row: Mapping[str, object]) -> None: ...
    def moved(self, progress: Progress) -> None: ...


class _Written:
    """JSON lines, TensorBoard and a bar."""

    def __init__(self, folder: RunFolder, board: SummaryWriter, bar: "tqdm[Any]") -> None:
        self._folder = folder
        self._board = board
        self._bar = bar

    def row(self, row: Mapping[str, object]) -> None:
        self._folder.write_row(row)
        step = cast(int, row["step"])
        for name, value in row.items():
            if isinstance(value, float):
                self._board.add_scalar(f"train/{name}", value, step)
        held_out = row.get("held_out")
        if isinstance(held_out, dict):
            for name, value in held_out.items():
                self._board.add_scalar(f"held_out/{name}", value, step)
            self._bar.set_postfix({name: f"{value:.3f}" for name, value in held_out.items()})

    def moved(self, progress: Progress) -> None:
        self._bar.total = progress.total_steps
        self._bar.update(progress.step - self._bar.n)


# -- small things ---------------------------------------------------------------------------------


def _head(request: TrainRequest, setting: _Setting) -> TrainableExitHead:
    """A head to train on, or one that begins as the target's last layer."""
    if request.start is not None:
        head = TrainableExitHead.read(request.start, target=setting.spec, target_path=request.model)
        found = (head.config.kind, head.exit_layer, head.reads_embedding)
        wanted = (request.head, request.exit_layer, request.reads_embedding)
        if found != wanted:
            raise ConfigError(
                f"{request.start}: found (kind, exit layer, reads the embedding) {found}, asked "
                f"for {wanted}: start from another head, or from none"
            )
        return head
    draft_vocab = None
    if request.head == "truncated":
        draft_vocab = draft_tokens(
            setting.store, setting.learnt, count=request.draft_vocab
        ).tolist()
    return TrainableExitHead.from_target(
        request.model,
        setting.spec,
        request.exit_layer,
        head=request.head,
        draft_vocab=draft_vocab,
        reads_embedding=request.reads_embedding,
    )


def _embedding(request: TrainRequest, setting: _Setting) -> Tensor:
    shape = (setting.spec.vocab_size, setting.spec.hidden_size)
    with Checkpoint(request.model) as checkpoint:
        embedding_WD = checkpoint.read(EMBEDDING, shape=shape, dtype=torch.float32)
    return embedding_WD.to(setting.device)


def _deepspeed_config(request: TrainRequest) -> dict[str, object]:
    options = request.options
    zero: dict[str, object] = {"stage": request.zero_stage}
    if request.zero_stage == 3:
        # A head is a dozen tensors: keeping the small ones whole would win nothing.
        zero["stage3_param_persistence_threshold"] = 0
    if options.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": options.rows // request.shape.num_shares,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.clip,
        "zero_optimization": zero,
        # Its own CPU optimizer would be compiled first; torch's needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.bfloat16},
        "steps_per_print": None,
    }


def _deepspeed(*, force_cpu: bool) -> Any:
    """DeepSpeed without its shared-memory all-reduce, which wants a compiler on the machine and
    stays on one host (DeepSpeed issue 7625), and without asking the compiler about other ops."""
    if force_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise ConfigError(
            f"training needs DeepSpeed ({error}): pip install 'eesd-dist[distill]'"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _figures(sums: Sequence[float]) -> Figures:
    loss, agreement, one_minus_tv, weight = sums
    weight = max(weight, 1e-9)
    return Figures(
        loss=loss / weight, agreement=agreement / weight, one_minus_tv=one_minus_tv / weight
    )


def _device(options: TrainOptions) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, and torch finds no CUDA device here: take auto or cpu")
    if options.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _require_bfloat16(device: torch.device) -> None:
    if device.type == "cuda":
        fits = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fits = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if not fits:
        raise ConfigError(
            f"bfloat16 training on {device.type}: this machine does not compute in bfloat16; leave "
            "bfloat16 off and train in float32"
        )


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{name} is {value}: it must be above 0")
