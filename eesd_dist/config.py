"""The configuration of one engine, in frozen sections.

YAML files, flags and environment variables set these fields. Unknown keys are refused. Hot-path
code receives plain values, never these models.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from eesd_dist.removed import replacement_of
from eesd_dist.types import (
    Device,
    StopRule,
    TreeShape,
)
from eesd_dist.types import DType as DType
from eesd_dist.types import DTypeSetting as DTypeSetting
from eesd_dist.types import KvCacheDType as KvCacheDType
from eesd_dist.types import Numerics as Numerics

Overlap = bool | Literal["auto"]


def _home_is_meant(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}: write the folder out") from error


HomePath = Annotated[Path, AfterValidator(_home_is_meant)]
"""A path that may begin with `~`. It is expanded where the configuration is read, since workers may
have another home directory."""


class Section(BaseModel):
    """Base of the configuration's sections. Unknown keys are refused, not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """The model's weights, and the numerics of its computation."""

    path: HomePath
    """Folder of the target: config.json, safetensors, tokenizer. Commands, and the class `LLM`,
    download a name of the Hugging Face hub."""

    head: HomePath | None = None
    """Folder of the exit head. None: `<path>/exit_head`, else the head that comes with this package
    for the model (SmolLM2), else plain decoding."""

    dtype: DTypeSetting = "auto"
    """Type of the weights. `auto`: that of config.json, else of the stored weights. CPUs compute in
    float32; in bfloat16 with `fast` numerics and bfloat16 instructions."""

    numerics: Numerics = "invariant"
    """`invariant`: a row's result never depends on the other rows of the batch, so that speculation
    changes no bit. `fast`: no such guarantee."""

    device: Device = "auto"
    """`auto` takes CUDA where there is one."""

    generation_config: Literal["auto", "none"] = "auto"
    """`auto`: generation_config.json gives `temperature`, `top_p`, `top_k`, `min_p` and
    `repetition_penalty` of requests without them; `max_new_tokens` bounds answers. `none`: only its
    end tokens count."""

    ignore_config_keys: tuple[str, ...] = ()
    """Unknown keys of config.json to compute the model without, although they may change logits.
    Other unknown keys with a number or switch refuse the model."""

    max_model_len: PositiveInt | None = None
    """Maximum length of prompt and answer together, in tokens. It must fit the checkpoint's
    positions and the KV pages. None: the smaller of the two."""


class CacheConfig(Section):
    """KV pages. All ranks of both stages have the same number: what the rank with the least room
    can hold."""

    page_size: PositiveInt = 32
    """Tokens in one page."""

    kv_cache_dtype: KvCacheDType = "auto"
    """Type of stored keys and values. `auto`: float32 on a CPU, that of the weights on a GPU, which
    takes no other. On a CPU bfloat16 halves the bytes; equal settings give equal texts."""

    kv_cache_bytes: PositiveInt | None = None
    """Bytes for the pages of each process, also of several on one host. None: on a GPU what
    `gpu_memory_utilization` leaves, on a CPU 512 MiB."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory for its rank's weights, activations and pages; of a part, where Ray
    gives the rank a part of a GPU."""

    num_pages: PositiveInt | None = None
    """Number of pages, whatever memory there is. None: sized from memory."""

    prefix_caching: bool = True
    """Reuses the pages of an earlier prompt for a prompt with the same prefix."""


class SchedulerConfig(Section):
    """Limits on the requests and tokens of a round."""

    max_running: PositiveInt = 32
    """Requests that hold pages at the same time."""

    max_waiting: PositiveInt = 256
    """Requests in the queue; the next one is refused with a clear error."""

    token_budget: PositiveInt = 512
    """Maximum known tokens (prefill chunks and last tokens) in one round."""

    prefill_chunk: PositiveInt = 256
    """Maximum tokens of one prompt in one round."""

    overlap: Overlap = "auto"
    """Uses two microbatches: one is drafted while the other is verified. `auto`: while this is
    faster than one batch by measured costs."""


class TreeConfig(Section):
    """Drafts with alternatives."""

    shape: TreeShape = "none"
    """`none`: chains. `static`: a fixed number of alternatives at each depth. `dynamic`:
    alternatives where they are likely to be accepted. A request may override it."""

    widths: tuple[PositiveInt, ...] = (2, 2, 1)
    """`static`: number of tokens drafted after each token, by depth; one beyond the last entry."""

    branch: PositiveInt = 2
    """`dynamic`: maximum tokens drafted after each token."""

    max_nodes: PositiveInt = 16
    """Maximum tokens of one tree; `max_draft_tokens` limits its depth."""

    def shape_of(self, requested: TreeShape | None) -> TreeShape:
        """Returns the request's shape, or the service's where the request has none."""
        return self.shape if requested is None else requested

    def width_at(self, depth: int, shape: TreeShape) -> int:
        """Returns how many tokens may be drafted after a node at this depth; 0 is the root."""
        if shape == "none":
            return 1
        if shape == "dynamic":
            return self.branch
        return self.widths[depth] if depth < len(self.widths) else 1


class SpeculationConfig(Section):
    """Settings for making and accepting drafts."""

    controller: str = "goodput"
    """Controller of draft lengths, by its name in `control.registry`: `goodput`, `smartspec`,
    `beta`, `calibration`, `ngram`, `fixed` (docs/control.md) or a registered one. A request may
    override it."""

    max_draft_tokens: NonNegativeInt = 8
    """Maximum tokens of one draft; the controller usually stops earlier. 0 is plain decoding."""

    acceptance: Literal["coupled", "rejection"] = "coupled"
    """`coupled` gives the same tokens as plain decoding; `rejection` is the published baseline."""

    learn_costs: bool = True
    """Corrects the start-up profile by the seconds of finished rounds; a `cost_file` is never
    corrected."""

    prompt_lookup: bool = True
    """Lets `goodput` and `ngram` draft what followed the text's last tokens where they stood
    before, in the prompt or the text, instead of the exit head's tokens."""

    tree: TreeConfig = TreeConfig()
    """Alternatives to the exit head's first choices."""

    fixed_length: NonNegativeInt = 4
    """Draft length of `fixed`, the longest of `ngram`."""

    redraw: Literal["token", "round"] = "round"
    """Draws of theta in Thompson sampling: once a round or for every token."""

    discount: float = Field(default=0.98, gt=0.0, le=1.0)
    """Factor by which the counts of earlier rounds are multiplied in every round."""

    calibration_strength: NonNegativeFloat = 256.0
    """Kappa of `calibration`: weight of the calibrated probability in judged tokens. 0: Beta-TS."""

    stop_rule: StopRule = "auto"
    """Draft length from sampled probabilities. `bernoulli`: the published draw per token.
    `optimal`: by expected tokens per second. `auto`: `optimal` when costs are known, else
    `bernoulli`."""

    log_evidence: bool = False
    """Adds the exit head's evidence to outcomes even when no controller asks for it."""

    seed: int = 0
    """Seed of the controllers' random draws, which never change a text."""

    learn: bool = True
    """False pins the controllers: no outcome changes a belief, and with a `cost_file` equal
    requests in equal order get equal draft lengths."""

    cost_file: Path | None = None
    """A measured cost model (`CostModel.save`) to use; None measures one at start-up."""

    @model_validator(mode="after")
    def _trees_are_coupled(self) -> Self:
        if self.acceptance == "rejection" and self.tree.shape != "none":
            raise ValueError(
                f"acceptance is rejection and tree.shape is {self.tree.shape}: rejection sampling "
                "judges chains; set tree.shape to none, or acceptance to coupled"
            )
        return self


class ParallelConfig(Section):
    """Ranks of each stage, and their communication."""

    draft_tensor_parallel_size: PositiveInt = 1
    """Ranks of the draft stage, the drafting actor included."""

    verify_tensor_parallel_size: PositiveInt = 1
    """Ranks of the verify stage."""

    # For D draft ranks, the first D verify ranks hold the embedding and 1/D of layers [0, N) with
    # their KV pages.
    fallback: bool = False
    """Loads the draft ranks' part of the target, without the exit head, into verify ranks: plain
    decoding continues while the draft stage is replaced."""

    timeout_s: PositiveFloat = 20.0
    """Deadline of every wait between ranks; the error names the peer."""

    num_threads: PositiveInt = 1
    """CPU threads of one rank; with `numerics: invariant` they change no text. Default of `LLM`,
    `eesd generate` and `eesd batch` without `--url`: OMP_NUM_THREADS, else all cores."""

    @property
    def num_ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.draft_tensor_parallel_size + self.verify_tensor_parallel_size

    @model_validator(mode="after")
    def _fallback_has_room(self) -> Self:
        draft, verify = self.draft_tensor_parallel_size, self.verify_tensor_parallel_size
        if self.fallback and draft > verify:
            raise ValueError(
                f"fallback needs a verify rank for each of the {draft} draft ranks, found "
                f"{verify}: raise verify_tensor_parallel_size to {draft}, lower "
                "draft_tensor_parallel_size, or leave fallback out"
            )
        return self


class GrammarConfig(Section):
    """Computing time that texts with a grammar may take. A mask, the tokens that may come next, is
    charged with what it takes beyond 2 ms; usual ones take less than 0.2 ms."""

    request_budget_s: PositiveFloat = 10.0
    """Charged seconds of one text; beyond them it ends with an error."""

    caller_budget_s: PositiveFloat = 30.0
    """Charged seconds of all texts of one API key, refilled at the rate below. Beyond them costly
    texts fail, and new ones get 429."""

    caller_refill: PositiveFloat = 0.05
    """Seconds that an API key may be charged for in each second, in the long run."""


class EngineConfig(Section):
    """Configuration of one pipeline (draft stage plus verify stage)."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    grammars: GrammarConfig = GrammarConfig()
    parallel: ParallelConfig = ParallelConfig()


def complaint_of(error: ValidationError, root: type[BaseModel]) -> str:
    """Returns the first error of a tree, and the number of the others."""
    first = error.errors(include_url=False)[0]
    path, value = [str(key) for key in first["loc"]], first["input"]
    text = f"{'.'.join(path)}: {first['msg']}, found {value!r}"
    if first["type"] == "extra_forbidden":
        text = f"{'.'.join(path)}: unknown key, found {value!r}; {_known_keys(path, root)}"
    elif isinstance(value, dict) and first["type"] == "value_error":  # it says what was found
        text = ": ".join([*filter(None, [".".join(path)]), str(first["ctx"]["error"])])
    elif isinstance(value, dict) and first["type"].endswith("_type"):
        text += ": this key takes a value, set it without a key below it"
    elif (replacement := replacement_of(f"{'.'.join(path)}: {value}")) is not None:
        text += f"; {replacement}"
    more = error.error_count() - 1
    return f"{text} (and {more} more)" if more else text


def _known_keys(path: Sequence[str], root: type[BaseModel]) -> str:
    """Suggests keys for the last part of `path`, or says what has replaced it."""
    replacement = replacement_of(".".join(path))
    if replacement is not None:
        return replacement
    section = root
    for key in path[:-1]:
        field = section.model_fields.get(key)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if not sections:
            return "remove it"
        section = sections[0]
    close = get_close_matches(path[-1], section.model_fields, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(section.model_fields)}"
