"""What can be asked of training: which head, from what, for how long, and how.

Decides the defaults and refuses what does not fit together; knows no files, no DeepSpeed, no Ray.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from eesd_dist.config import DType
from eesd_dist.distill.train.batches import BatchShape
from eesd_dist.distill.train.losses import LossOptions
from eesd_dist.errors import ConfigError
from eesd_dist.model.head_config import HeadKind


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
        return {k: str(v.resolve()) if isinstance(v, Path) else v for k, v in said.items()}


_MAY_CHANGE = frozenset(
    {"log_every", "checkpoint_every_s", "checkpoint_every_steps", "threads", "device", "keep"}
)


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{name} is {value}: it must be above 0")
