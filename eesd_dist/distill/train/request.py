"""Options of training, and the inputs that a run reads before its first step.

Decides defaults, valid combinations, training sequences, device and initial head, equally on every
rank. Does not depend on DeepSpeed or Ray.
"""

# Shapes: W target vocabulary.

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from eesd_dist.backends.api import engine_on
from eesd_dist.checks import require_positive
from eesd_dist.config import DType
from eesd_dist.devices import HOST
from eesd_dist.distill.features import MANIFEST_FILE, FeatureStore
from eesd_dist.distill.train.batches import BatchShape
from eesd_dist.distill.train.losses import LossOptions
from eesd_dist.engine.layout import device_named
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec

_MAY_CHANGE = frozenset(
    {"log_every", "checkpoint_every_s", "checkpoint_every_steps", "device", "keep"}
)
"""Options that may change when a run is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Training options. The defaults fit a small model on a CPU."""

    rows: Annotated[int, "rows per step, over all workers and accumulated micro-batches"] = 16
    length: Annotated[int, "maximum tokens of a row"] = 256
    accumulation: Annotated[int, "micro-batches of a step"] = 1
    learning_rate: Annotated[float, "--rate: maximum learning rate"] = 2e-3
    warmup_steps: Annotated[int, "steps of linear warm-up"] = 20
    weight_decay: Annotated[float, "weight decay of AdamW"] = 0.0
    clip: Annotated[float, "maximum norm of a gradient"] = 1.0
    loss: LossOptions = field(default_factory=LossOptions)
    prompt_weight: Annotated[float, "weight of a position in a prompt; in an answer it is 1"] = 1.0
    source: Annotated[
        Literal["features", "live"], "live: the target runs at every step, only tokens are read"
    ] = "features"
    held_out_share: Annotated[float, "share of sequences held out for evaluation"] = 0.1
    held_out_sequences: Annotated[int, "maximum number of held-out sequences"] = 64
    evaluate_every: Annotated[int, "steps between evaluations"] = 200
    log_every: Annotated[int, "steps between log rows"] = 10
    checkpoint_every_s: Annotated[float, "--checkpoint-every: seconds"] = 60.0
    checkpoint_every_steps: Annotated[int | None, "steps, in addition to seconds"] = None
    keep: Annotated[
        Literal["best", "last"], "which head to save; best: by 1 - TV on held-out text"
    ] = "best"
    offload_optimizer: Annotated[
        bool, "optimizer state in host memory; with ZeRO stages 1 to 3"
    ] = False
    bfloat16: Annotated[bool, "train in bfloat16, on machines that support it"] = False
    save_dtype: Annotated[DType, "type of the saved head"] = "bfloat16"
    window_mib: Annotated[int, "MiB of features in memory, per worker"] = 2048
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: CUDA if available"] = "auto"

    def __post_init__(self) -> None:
        require_positive(self, "rows", "length", "accumulation", "warmup_steps", "evaluate_every")
        require_positive(self, "log_every", "learning_rate", "clip", "window_mib")
        require_positive(self, "checkpoint_every_s", "checkpoint_every_steps")
        if not 0.0 <= self.held_out_share < 1.0:
            raise ConfigError(f"held_out_share is {self.held_out_share}: expected 0 to less than 1")
        if self.prompt_weight < 0.0 or self.weight_decay < 0.0:
            raise ConfigError("prompt_weight and weight_decay must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Options of training one head."""

    model: Annotated[Path, "folder of the target (the bundled one)"]
    features: Annotated[Path, "output folder of `eesd distill collect`"]
    out: Annotated[Path, "folder of the head; written when training has ended"]
    checkpoints: Annotated[Path | None, "folder of the run (OUT.run), shared by all nodes"] = None
    exit_layer: Annotated[int, "--exit: the head reads the state after this many layers"] = 1
    head: Annotated[HeadKind, "kind of LM head"] = "truncated"
    draft_vocab: Annotated[int, "tokens of a truncated head"] = 2048
    minutes: Annotated[float | None, "minutes of training"] = None
    max_steps: Annotated[int | None, "maximum number of steps"] = None
    workers: Annotated[int, "processes"] = 1
    zero_stage: Annotated[int, "0 to 3: what DeepSpeed partitions"] = 0
    start: Annotated[
        Path | None, "a head to train further; default: start from the target's last layer"
    ] = None
    seed: int = 0
    threads: Annotated[int | None, "CPU threads of one worker (an even share)"] = None
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        if self.minutes is None and self.max_steps is None:
            raise ConfigError("found neither minutes nor max_steps: set one to end the training")
        require_positive(self, "minutes", "max_steps", "workers", "draft_vocab", "threads")
        if self.zero_stage not in range(4):
            raise ConfigError(f"zero_stage is {self.zero_stage}: expected 0, 1, 2 or 3")
        if self.options.offload_optimizer and self.zero_stage == 0:
            raise ConfigError(
                "offload_optimizer at ZeRO stage 0: nothing is partitioned there; use zero_stage "
                "1, 2 or 3, or leave it off"
            )
        _ = self.shape

    @property
    def run_folder(self) -> Path:
        """Folder of checkpoints, log and TensorBoard."""
        return self.checkpoints or self.out.with_name(f"{self.out.name}.run")

    @property
    def shape(self) -> BatchShape:
        options = self.options
        shares = self.workers * options.accumulation
        return BatchShape(rows=options.rows, length=options.length, num_shares=shares)

    @property
    def threads_of_worker(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.workers)

    def job(self) -> dict[str, object]:
        """Returns the options that must not change when a run is resumed."""
        settings = asdict(self)
        settings["options"] = {
            name: value for name, value in settings["options"].items() if name not in _MAY_CHANGE
        }
        for name in ("out", "checkpoints", "threads"):
            del settings[name]
        if self.zero_stage == 0:  # any number of workers can read the optimizer's state
            del settings["workers"]
        return {k: str(v.resolve()) if isinstance(v, Path) else v for k, v in settings.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """Inputs of a run: the target's specification, the store and its split."""

    spec: ModelSpec
    store: FeatureStore
    features_sha256: str
    """Hash of the store's manifest, which has every shard's checksum."""
    learnt: tuple[int, ...]
    judged: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, request: TrainRequest, *, device: torch.device) -> Self:
        """Reads the store's manifest. `device`: what this process trains on."""
        options = request.options
        store = FeatureStore.of_target(request.features, request.model)
        if request.exit_layer not in store.manifest.exits:
            raise ConfigError(
                f"{request.features}: features after layers {list(store.manifest.exits)}, not "
                f"after {request.exit_layer}: collect with --exits {request.exit_layer}"
            )
        learnt, held_out = store.split(options.held_out_share, request.seed)
        return cls(
            spec=ModelSpec.from_folder(request.model),
            store=store,
            features_sha256=sha256((store.folder / MANIFEST_FILE).read_bytes()).hexdigest(),
            learnt=learnt,
            judged=held_out[: options.held_out_sequences],
            device=device,
        )

    def job(self, request: TrainRequest) -> dict[str, object]:
        """Returns the options that must not change when a run is resumed."""
        return {**request.job(), "features_sha256": self.features_sha256}


def first_head(request: TrainRequest, inputs: TrainInputs) -> TrainableExitHead:
    """Returns the head to train further, or one initialized with the target's last layer."""
    if request.start is not None:
        head = TrainableExitHead.read(request.start, target=inputs.spec, target_path=request.model)
        actual = (head.config.kind, head.exit_layer)
        requested = (request.head, request.exit_layer)
        if actual != requested:
            raise ConfigError(
                f"{request.start}: found (kind, exit layer) {actual}, asked for {requested}: start "
                "from another head, or from none"
            )
        return head
    draft_vocab = None
    if request.head == "truncated":
        draft_vocab = draft_tokens(inputs.store, inputs.learnt, count=request.draft_vocab).tolist()
    return TrainableExitHead.from_target(
        request.model,
        inputs.spec,
        request.exit_layer,
        head=request.head,
        draft_vocab=draft_vocab,
    )


def draft_tokens(store: FeatureStore, only: Sequence[int], *, count: int) -> Tensor:
    """Returns a truncated vocabulary, ascending: the most frequent tokens in the target's text,
    and if they are too few, the most frequent ones of the prompts."""
    vocab_size = store.manifest.verifier.vocab_size
    selected = frozenset(only)
    texts = [text for number, text in enumerate(store.texts()) if number in selected]
    prompts = torch.cat([tokens_T[:num_prompt] for tokens_T, num_prompt in texts])
    answers = torch.cat([tokens_T[num_prompt:] for tokens_T, num_prompt in texts])
    # Counted at once: a large vocabulary is longer than most texts.
    prompt_W, written_W = (torch.bincount(x, minlength=vocab_size) for x in (prompts, answers))
    score_W = written_W * (prompt_W.sum() + 1) + prompt_W
    order_W = score_W.argsort(descending=True, stable=True)
    return order_W[: min(count, vocab_size)].sort().values


def device_of(options: TrainOptions) -> torch.device:
    """Returns the device that this process trains on.

    Raises ConfigError if it has none of the wanted kind, or one without the wanted type.
    """
    device = _device_of(options)
    if options.bfloat16:
        _require_bfloat16(device)
    return device


def _device_of(options: TrainOptions) -> torch.device:
    device = device_named(options.device, setting="device")
    if device == HOST:
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))


def _require_bfloat16(device: torch.device) -> None:
    if not engine_on(device).multiplies_bfloat16:
        raise ConfigError(
            f"bfloat16 training on {device.type}: this machine does not support bfloat16; leave "
            "bfloat16 off and train in float32"
        )
