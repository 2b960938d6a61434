"""Predicts whether speculation would pay on given machines.

`plan` judges one split, `search` finds the best ones. Both compare with plain decoding on all GPUs
of the nodes, those that the split leaves unused included: by tensor parallelism over all of them,
or by replicas, whichever is fastest. The acceptance is an input; the acceptance at which
speculation breaks even is reported.
"""

from dataclasses import dataclass

from cluster.planning.forecast import (
    LengthForecast,
    PipelineForecast,
    PlainForecast,
    plain_forecasts,
    share_of,
)
from cluster.planning.machine import Machine
from cluster.planning.memory import RankMemory, memory_of, require_memory
from cluster.planning.shapes import Acceptance, Load, ModelShape, Split
from cluster.planning.stage_times import Batch, StageTimes
from eesd_dist.errors import ConfigError
from eesd_dist.model.degrees import require_degree

_BISECTIONS = 30
_MOST_REQUESTS, _MOST_TOKENS, _MOST_DRAFTED = 1_000_000, 100_000_000, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The forecast for one model, machine, split and load."""

    split: Split
    load: Load
    acceptance: Acceptance
    num_pipelines: int
    num_gpus: int
    """All GPUs of the nodes; plain decoding gets as many."""
    draft_step_s: float
    """Seconds of one drafted token through [0, N) and the exit head."""
    verify_pass_s: float
    """Layers [N, L) and the LM head over one row of each request."""
    lengths: tuple[LengthForecast, ...]
    """Draft lengths 0, 1, 2 ... of one pipeline; 0 is plain decoding over the two stages."""
    plain: tuple[PlainForecast, ...]
    """Plain decoding on these GPUs, the fastest first; empty if the model fits in none."""
    memories: tuple[RankMemory, ...]
    forecast: PipelineForecast
    """Forecast of the pipeline with the most requests."""

    @property
    def num_used_gpus(self) -> int:
        """GPUs of all pipelines; the others of the nodes are left over."""
        return self.num_pipelines * self.split.num_gpus

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.forecast.times.machine.network.gpus_per_node)

    @property
    def best(self) -> LengthForecast:
        return max(self.lengths, key=lambda row: (row.tokens_per_s, -row.num_draft_tokens))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all pipelines, with the best length."""
        return _of_all(self.best, self.load)

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens per second of the fastest plain decoding on all GPUs of the nodes."""
        return _fastest_plain(self.plain, self.lengths[0], self.load)

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def pays(self) -> bool:
        return self.best.num_draft_tokens > 0 and self.speedup > 1.0

    @property
    def break_even_acceptance(self) -> float | None:
        """Above it the best length is faster than all plain decoding; None: 1.0 is not enough."""
        plain = self.plain_tokens_per_s

        def wins(acceptance: float) -> bool:
            rows = self.forecast.lengths(Acceptance(rate=acceptance))[1:]
            return max(_of_all(row, self.load) for row in rows) > plain

        if self.load.max_draft_tokens == 0 or not wins(1.0):
            return None
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if wins(middle) else (middle, high)
        return high


def plan(
    shape: ModelShape,
    *,
    machine: Machine,
    split: Split,
    load: Load,
    acceptance: Acceptance,
    num_gpus: int,
    num_pipelines: int = 1,
    plain: tuple[PlainForecast, ...] | None = None,
) -> Plan:
    """Predicts every draft length up to the maximum.

    `load` is that of all pipelines, which share its requests evenly. `num_gpus`: all GPUs of the
    nodes. `plain`: those of `plain_forecasts`, if known.

    Raises ConfigError for a split that the model does not allow or that does not fit the memory.
    """
    require_split(shape, split)
    require_load(load)
    share = share_of(load, num_pipelines)
    memories = memory_of(shape, split=split, load=share)
    require_memory(memories, machine.memory_bytes)
    if plain is None:
        plain = plain_forecasts(shape, machine=machine, load=load, num_gpus=num_gpus)
    times = StageTimes(shape=shape, machine=machine, split=split)
    # The first ranks of both stages are one process: there is nothing to overlap.
    forecast = PipelineForecast(times=times, load=share, overlaps=not split.shares_gpu)
    batch = Batch(num_requests=share.num_requests, context_tokens=load.context_tokens)
    return Plan(
        split=split,
        load=load,
        acceptance=acceptance,
        num_pipelines=num_pipelines,
        num_gpus=num_gpus,
        draft_step_s=times.draft_step_s(batch),
        verify_pass_s=times.verify_s(batch, 0),
        lengths=forecast.lengths(acceptance),
        plain=plain,
        memories=memories,
        forecast=forecast,
    )


def _of_all(row: LengthForecast, load: Load) -> float:
    """Returns the tokens per second of all requests: every pipeline takes the time of the one with
    the most requests."""
    return load.num_requests * row.expected_tokens / row.round_s


def _fastest_plain(plain: tuple[PlainForecast, ...], staged: LengthForecast, load: Load) -> float:
    return max([_of_all(staged, load), *(forecast.tokens_per_s for forecast in plain)])


def require_split(shape: ModelShape, split: Split) -> None:
    """Raises ConfigError for a split that the model does not allow."""
    if not 1 <= split.exit_layer < shape.num_layers:
        raise ConfigError(
            f"exit layer {split.exit_layer} in a model of {shape.num_layers} layers: "
            f"choose 1 to {shape.num_layers - 1}"
        )
    for size in (split.draft_tensor_parallel_size, split.verify_tensor_parallel_size):
        require_degree(
            size,
            model="this model",
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            num_channels=shape.intermediate_size,
            norms_heads_jointly=shape.norms_heads_jointly,
        )
    if split.draft_vocab_size is not None:
        require_vocabulary(shape, split.draft_vocab_size)


def require_vocabulary(shape: ModelShape, size: int) -> None:
    """Raises ConfigError for a draft vocabulary that the model does not allow."""
    if not 1 <= size <= shape.vocab_size:
        raise ConfigError(
            f"draft vocabulary of {size} tokens: expected 1 to {shape.vocab_size}, the model's "
            "vocabulary"
        )


def require_load(load: Load) -> None:
    """Raises ConfigError for a load that cannot be."""
    for name, number, low, high in (
        ("requests", load.num_requests, 1, _MOST_REQUESTS),
        ("tokens of context", load.context_tokens, 0, _MOST_TOKENS),
        ("draft tokens", load.max_draft_tokens, 0, _MOST_DRAFTED),
    ):
        if not low <= number <= high:
            raise ConfigError(f"{number} {name}: expected {low} to {high}")
