"""The configuration of one engine: frozen sections, composed, written down once.

Where people type (YAML, flags, environment) this is what they type into. Unknown keys are
refused. Hot-path code receives plain values, never these models.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from eesd_dist.types import (
    Device,
    StopRule,
    TreeShape,
)
from eesd_dist.types import DType as DType
from eesd_dist.types import DTypeSetting as DTypeSetting
from eesd_dist.types import Numerics as Numerics

Overlap = bool | Literal["auto"]


def _home_is_meant(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}: write the folder out") from error


HomePath = Annotated[Path, AfterValidator(_home_is_meant)]
"""A path that may begin with `~`, which is the home of whoever reads the configuration: workers may
have another one."""


class Section(BaseModel):
    """One part of the configuration. Unknown keys are refused, not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """Which weights, and how they are computed with."""

    path: HomePath
    """Folder of the target: config.json, safetensors, tokenizer."""

    head: HomePath | None = None
    """Folder of the exit head. None takes `<path>/exit_head` where it exists; without either there
    is plain decoding only."""

    dtype: DTypeSetting = "auto"
    """Type of the weights. `auto` takes the checkpoint's own: the one its config.json names, else
    the one its weights are stored in. A CPU computes on bfloat16 and float16 weights in float32;
    `fast` on one with bfloat16 instructions computes in bfloat16."""

    numerics: Numerics = "invariant"
    """`invariant`: a row's result never depends on the rows beside it, so that speculation on and
    off agree bit for bit. `fast`: no such promise, and a stated mismatch rate."""

    device: Device = "auto"
    """`auto` takes CUDA where there is one."""

    max_model_len: PositiveInt | None = None
    """Longest prompt plus answer; None takes the checkpoint's own limit."""


class CacheConfig(Section):
    """KV pages, counted once for all stages."""

    page_size: PositiveInt = 32
    """Tokens in one page."""

    num_pages: PositiveInt = 512
    """Pages in every stage's cache."""

    prefix_caching: bool = True
    """Whether a prompt that begins like an earlier one reuses its pages."""


class SchedulerConfig(Section):
    """Who runs in a round, and how much of it."""

    max_running: PositiveInt = 32
    """Requests that hold pages at the same time."""

    max_waiting: PositiveInt = 256
    """Requests in the queue; the next one is refused with a clear error."""

    token_budget: PositiveInt = 512
    """Known tokens (prefill chunks and last tokens) one round may carry."""

    prefill_chunk: PositiveInt = 256
    """Longest piece of one prompt in one round."""

    overlap: Overlap = "auto"
    """Two microbatches take turns: one is drafted while the other is verified. `auto`: while
    measured costs say that this earns more than one batch of all, which it does where drafting
    takes about as long as verifying."""


class TreeConfig(Section):
    """What a draft may look like when it is not a chain."""

    shape: TreeShape = "none"
    """`none`: chains. `static`: so many alternatives at each depth, as deep as the controller goes.
    `dynamic`: alternatives are drafted where they are likely to survive. A request may say another
    one for itself."""

    widths: tuple[PositiveInt, ...] = (2, 2, 1)
    """`static`: tokens drafted to follow each token, by depth; beyond the last entry one."""

    branch: PositiveInt = 2
    """`dynamic`: tokens that may be drafted to follow each token."""

    max_nodes: PositiveInt = 16
    """Tokens of one tree; `max_draft_tokens` bounds its depth."""

    def shape_of(self, wished: TreeShape | None) -> TreeShape:
        """A request's own shape, or the service's."""
        return self.shape if wished is None else wished

    def width_at(self, depth: int, shape: TreeShape) -> int:
        """How many tokens may be offered to follow one that has `depth` drafted ones up to it."""
        if shape == "none":
            return 1
        if shape == "dynamic":
            return self.branch
        return self.widths[depth] if depth < len(self.widths) else 1


class SpeculationConfig(Section):
    """How far ahead we dare to guess."""

    controller: str = "goodput"
    """Name in `control.registry` of what decides when to stop drafting, unless a request names
    another. `goodput` weighs the whole batch's tokens against the measured seconds; `beta` and
    `calibration` are Thompson sampling for one request; the others are there to be compared
    with."""

    max_draft_tokens: NonNegativeInt = 8
    """Ceiling on one draft; the controller usually stops sooner. 0 is plain decoding."""

    acceptance: Literal["coupled", "rejection"] = "coupled"
    """`coupled` gives the very tokens of plain decoding; `rejection` is the published baseline."""

    draft_ahead: bool = True
    """With one microbatch in flight the drafter goes on past its last token while it waits."""

    tree: TreeConfig = TreeConfig()
    """Alternatives beside the exit head's first choices."""

    fixed_length: NonNegativeInt = 4
    """Draft length of the `fixed` controller."""

    threshold: float = Field(default=0.6, ge=0.0, le=1.0)
    """The `threshold` controller stops below this top-1 probability of the exit head."""

    redraw: Literal["token", "round"] = "round"
    """Whether Thompson sampling draws theta once a round or for every token."""

    discount: float = Field(default=0.98, gt=0.0, le=1.0)
    """What an old round's counts are multiplied with at every new one."""

    calibration_form: Literal["gaussian", "beta"] = "beta"
    """Which of the two forms of Calibration-TS."""

    calibration_strength: NonNegativeFloat = 256.0
    """Kappa of the beta form: the calibrated probability is worth this many judged tokens. 0 is
    Beta-TS."""

    calibration_prior_std: PositiveFloat = 0.05
    """s0 of the gaussian form: how far the calibrated probability is expected to be off."""

    calibration_variance_floor: PositiveFloat = 0.04
    """Gaussian form: variance a request's past rate keeps as a forecast of its next token, however
    many rounds it has seen. Tokens of one text differ; about 0.04 is a spread of 0.2."""

    stop_rule: StopRule = "auto"
    """What turns sampled acceptance probabilities into a length. `bernoulli`: a toss of the sampled
    coin per token, the published rule. `optimal`: draft on while the round's expected tokens per
    second rise, by the measured cost model. `steady`: while the next token earns more per second
    than the request has earned so far. `auto`: `optimal` when costs are known, else `bernoulli`."""

    log_evidence: bool = False
    """Outcomes carry the exit head's evidence even when no controller asks for it."""

    seed: int = 0
    """Seeds the controllers' draws; they can never change a text."""

    learn: bool = True
    """False pins the controllers for runs that are to be repeated: no outcome changes a belief, and
    with a `cost_file` the same requests in the same order get the same draft lengths."""

    cost_file: Path | None = None
    """A measured cost model (`CostModel.save`) to decide by; None measures one at start-up."""

    @model_validator(mode="after")
    def _trees_are_coupled(self) -> Self:
        if self.acceptance == "rejection" and self.tree.shape != "none":
            raise ValueError(
                f"acceptance is rejection and tree.shape is {self.tree.shape}: rejection sampling "
                "judges chains; set tree.shape to none, or acceptance to coupled"
            )
        return self


class ParallelConfig(Section):
    """How many ranks hold a stage, and how they talk."""

    draft_tensor_parallel_size: PositiveInt = 1
    """Ranks of the draft stage, the drafting actor included."""

    verify_tensor_parallel_size: PositiveInt = 1
    """Ranks of the verify stage."""

    fallback: bool = False
    """Whether the first D verify ranks, D being the number of draft ranks, also hold what a draft
    rank has of the target: the embedding, 1/D of layers [0, N) and their KV pages, without the exit
    head. Plain decoding then goes on there while a process of the draft stage is replaced."""

    timeout_s: PositiveFloat = 20.0
    """Deadline of every wait between ranks; the error names the peer."""

    num_threads: PositiveInt = 1
    """CPU threads of one rank."""

    @model_validator(mode="after")
    def _fallback_has_room(self) -> Self:
        draft, verify = self.draft_tensor_parallel_size, self.verify_tensor_parallel_size
        if self.fallback and draft > verify:
            raise ValueError(
                f"fallback wants a verify rank for each of the {draft} draft ranks, and there are "
                f"{verify}: raise verify_tensor_parallel_size to {draft}, lower "
                "draft_tensor_parallel_size, or leave fallback out"
            )
        return self


class EngineConfig(Section):
    """Everything one pipeline (draft stage plus verify stage) is made from."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    parallel: ParallelConfig = ParallelConfig()
