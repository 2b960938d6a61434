"""`eesd distill run --dry-run`: disk, memory and time of a run, before anything is done.

Arithmetic over the target's config, the prompts and the options; no weights are read. Sizes are
upper bounds where the length of an answer matters: every answer is taken to be as long as it may
be. Times follow from two rates that the caller states, or from the run's own limits.
"""

from dataclasses import dataclass
from typing import Annotated

from eesd_dist.checks import require_positive
from eesd_dist.distill.collect import planned_parts
from eesd_dist.distill.held_out import PromptParts
from eesd_dist.distill.run import RunRequest
from eesd_dist.engine.recording.text_features import MAX_BYTES
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.spec import ModelSpec

_CHUNKS_AT_A_TIME = 2
_LOGITS_COPIES = 4
"""Tensors of the logits' size that a training step has at once, in float32."""
_NUM_CHECKPOINTS = 3
"""Kept ones, and one that is being written."""
_STEP_FLOPS = 6
"""Operations per trained parameter and token: forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Choice to state only the cost of a run, and the speeds for it."""

    dry_run: Annotated[bool, "state disk, memory and time, and do nothing"] = False
    tokens_per_s: Annotated[
        float, "for --dry-run: tokens per second that the target writes, all requests together"
    ] = 1000.0
    tflops: Annotated[float, "for --dry-run: 10^12 operations per second of a training process"] = (
        100.0
    )

    def __post_init__(self) -> None:
        require_positive(self, "tokens_per_s", "tflops")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSize:
    """Parameters of a head."""

    layer: int
    norm: int
    lm_head: int
    is_shared: bool

    @classmethod
    def of(cls, spec: ModelSpec, *, kind: HeadKind, draft_vocab: int) -> "HeadSize":
        width = spec.hidden_size
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        num_tokens = min(draft_vocab, spec.vocab_size) if kind == "truncated" else spec.vocab_size
        return cls(
            layer=2 * width * (queries + keys) + 3 * width * spec.intermediate_size + 2 * width,
            norm=width,
            lm_head=num_tokens * width,
            is_shared=kind == "shared",
        )

    @property
    def trained(self) -> int:
        return self.layer + self.norm + (0 if self.is_shared else self.lm_head)

    @property
    def total(self) -> int:
        return self.layer + self.norm + self.lm_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Disk, memory and time of a run, each at most."""

    num_rounds: int
    """Rounds of collecting and training; 1 without a ring."""
    num_sequences: int
    num_written: int
    """Tokens that the target writes for the features."""
    num_rows: int
    num_judged: int
    """Tokens that it writes for calibration and evaluation."""
    features_bytes: int
    """Features on disk at a time; a ring replaces them in each round."""
    checkpoints_bytes: int
    head_bytes: int
    collector_bytes: int
    """Features in the memory of the collecting process, without the target."""
    pipeline_bytes: int
    """Features in the memory of a drafting actor."""
    training_bytes: int
    """Memory of one training process, without libraries."""
    judging_bytes: int
    """Memory of calibration or evaluation, without the target."""
    collect_s: float
    train_s: float
    judge_s: float

    @property
    def disk_bytes(self) -> int:
        return self.features_bytes + self.checkpoints_bytes + self.head_bytes


def estimate(request: RunRequest, rates: Rates) -> Estimate:
    """Returns the estimate. Reads the target's config and tokenizer, and the prompts."""
    options = request.collect
    spec = ModelSpec.from_folder(options.model)
    recipe = request.collection.recipe()
    portions = planned_parts(options, recipe, say=lambda _: None)
    if not request.ring:
        del portions[1:]
    chunks = [chunk for portion in portions for chunk in portion]
    split = options.prompt_choice().read(options.model)
    head = HeadSize.of(
        spec,
        kind=request.head,
        draft_vocab=request.draft_vocab,
    )
    shard_bytes = [recipe.most_bytes(chunk) for chunk in chunks]
    features_bytes = max(sum(map(recipe.most_bytes, portion)) for portion in portions)
    num_sequences = sum(len(chunk.sources) for chunk in chunks)
    num_written = recipe.max_tokens * sum(s.is_prompt for c in chunks for s in c.sources)
    num_judged = _judged_tokens(request, split)
    limit_s = 60.0 * request.minutes
    train_flops = _STEP_FLOPS * head.trained * request.options.rows * request.options.length
    step_s = train_flops / (1e12 * rates.tflops * request.train_workers)
    train_s = 0.4 * limit_s
    if request.max_steps is not None:
        train_s = min(train_s, step_s * request.max_steps)
    return Estimate(
        num_rounds=len(portions),
        num_sequences=num_sequences,
        num_written=num_written,
        num_rows=sum(chunk.most_rows(recipe) for chunk in chunks),
        num_judged=num_judged,
        features_bytes=features_bytes,
        checkpoints_bytes=_NUM_CHECKPOINTS * _checkpoint_bytes(head, request)
        + _heads_of_training_bytes(head, num_rounds=len(portions)),
        head_bytes=2 * (head.trained if head.is_shared else head.total),
        # Twice a shard: on a CPU hidden states are computed in float32.
        collector_bytes=_CHUNKS_AT_A_TIME * 2 * max(shard_bytes),
        pipeline_bytes=min(MAX_BYTES, _CHUNKS_AT_A_TIME * 2 * max(shard_bytes)),
        training_bytes=_training_bytes(head, spec, request, features_bytes=features_bytes),
        judging_bytes=_judging_bytes(head, spec, request, split),
        collect_s=min(0.4 * limit_s, num_written / rates.tokens_per_s),
        train_s=train_s,
        judge_s=num_judged / rates.tokens_per_s,
    )


def described(figures: Estimate, request: RunRequest, rates: Rates) -> str:
    """Returns the estimate as a table."""
    training = "for each of " + str(request.train_workers) if request.train_workers > 1 else ""
    rounds = f" in {figures.num_rounds} rounds" if figures.num_rounds > 1 else ""
    steps = ""
    if request.max_steps is not None:
        steps = f"{request.max_steps} steps at {rates.tflops:g} Tflop/s, or "
    rows = [
        ("disk: features", _size(figures.features_bytes), f"{figures.num_rows:,} rows{rounds}"),
        ("disk: checkpoints", _size(figures.checkpoints_bytes), "two and an incomplete one"),
        ("disk: head", _size(figures.head_bytes), ""),
        ("disk: together", _size(figures.disk_bytes), ""),
        ("memory: collecting", _size(figures.collector_bytes), "of features, without libraries"),
        ("memory: drafting actor", _size(figures.pipeline_bytes), "more than for serving"),
        ("memory: training", _size(figures.training_bytes), training),
        ("memory: calibrating", _size(figures.judging_bytes), "without the target"),
        (
            "time: collecting",
            _time(figures.collect_s),
            f"{figures.num_written:,} tokens at {rates.tokens_per_s:,.0f} tokens/s",
        ),
        (
            "time: training",
            _time(figures.train_s),
            f"{steps}two fifths of --minutes",
        ),
        (
            "time: calibrating",
            _time(figures.judge_s),
            f"and evaluating: {figures.num_judged:,} tokens",
        ),
    ]
    lines = [f"{name:24}{size:>10}  {note}".rstrip() for name, size, note in rows]
    return "\n".join([f"{figures.num_sequences:,} texts; each figure is an upper bound", *lines])


def _judged_tokens(request: RunRequest, split: PromptParts) -> int:
    head_request = request.head_request_of(split)
    calibrated = len(head_request.calibrated) * len(head_request.calibration.temperatures)
    judged = len(head_request.judged) * len(head_request.evaluation.temperatures)
    return (
        calibrated * head_request.calibration.max_tokens
        + judged * head_request.evaluation.max_tokens
    )


def _checkpoint_bytes(head: HeadSize, request: RunRequest) -> int:
    """Weights, master weights where they are in bfloat16, and Adam's two moments."""
    weight_bytes = 2 + 4 if request.options.bfloat16 else 4
    return head.trained * (weight_bytes + 8)


def _heads_of_training_bytes(head: HeadSize, *, num_rounds: int) -> int:
    """The best head; between rounds in float32, with the heads of two rounds."""
    return 2 * head.total if num_rounds == 1 else 3 * 4 * head.total


def _training_bytes(
    head: HeadSize, spec: ModelSpec, request: RunRequest, *, features_bytes: int
) -> int:
    options, workers = request.options, request.train_workers
    weights, gradients = (2, 2) if options.bfloat16 else (4, 4)
    states = 8 + (4 if options.bfloat16 else 0)
    stage = request.zero_stage
    per_parameter = (
        weights / (workers if stage == 3 else 1)
        + gradients / (workers if stage >= 2 else 1)
        + states / (workers if stage >= 1 else 1)
    )
    rows = options.rows * options.length // (workers * options.accumulation)
    num_tokens = head.lm_head // spec.hidden_size
    frozen = head.total - head.trained
    return (
        round(head.trained * per_parameter)
        + weights * frozen
        + min(options.window_mib * 2**20, features_bytes)
        + 4 * rows * num_tokens * _LOGITS_COPIES
    )


def _judging_bytes(head: HeadSize, spec: ModelSpec, request: RunRequest, split: PromptParts) -> int:
    """The head, the features of a batch of texts, and one text's logits."""
    longest = max(len(prompt.tokens) for prompt in (*split.calibrated, *split.judged))
    rows = longest + request.collect.max_tokens
    num_tokens = head.lm_head // spec.hidden_size
    return (
        4 * head.total
        + 16 * rows * (4 * spec.hidden_size + 8 * min(256, spec.vocab_size))
        + 4 * rows * num_tokens * _LOGITS_COPIES
    )


def _size(num_bytes: float) -> str:
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1e3
        if num_bytes < 1e3:
            return f"{num_bytes:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} TB"


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
