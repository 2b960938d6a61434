"""Speed of one pipeline by draft length, and of plain decoding on as many GPUs.

A pipeline runs all its requests in one batch or in two microbatches that take turns, whichever is
faster, as `scheduler.overlap: auto` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.planning.machine import Machine
from cluster.planning.memory import memory_of_plain
from cluster.planning.shapes import Acceptance, Load, ModelShape, Split
from cluster.planning.stage_times import Batch, StageTimes
from eesd_dist.control.overlap_policy import MARGIN
from eesd_dist.model.degrees import tensor_parallel_degrees

_GAIN = 1.0 + MARGIN
"""Gain at which the engine takes two microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthForecast:
    """The forecast for one fixed draft length."""

    num_draft_tokens: int
    draft_s: float
    transfer_s: float
    verify_s: float
    host_s: float
    """Planning, header, commit. This and the times above are of one batch or microbatch."""
    num_microbatches: int
    round_s: float
    """Seconds until every request has had a round."""
    expected_tokens: float
    """Per request and round."""
    tokens_per_s: float
    """Tokens per second of all requests together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForecast:
    """Plain decoding by replicas of one tensor-parallel group each."""

    num_ranks: int
    num_replicas: int
    step_s: float
    tokens_per_s: float

    @property
    def name(self) -> str:
        return f"{self.num_replicas} x TP {self.num_ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineForecast:
    """Forecast of one split under one load."""

    times: StageTimes
    load: Load
    overlaps: bool = True
    """True if two microbatches may take turns."""

    def lengths(self, acceptance: Acceptance) -> tuple[LengthForecast, ...]:
        """Returns draft lengths 0, 1, 2 ...; 0 is plain decoding over the two stages."""
        expected = acceptance.expected_tokens(self.load.max_draft_tokens)
        return tuple(self.length(k, tokens) for k, tokens in enumerate(expected))

    def length(self, k: int, expected_tokens: float) -> LengthForecast:
        full = self._seconds_of(self.load.num_requests, k)
        seconds, num_microbatches, round_s = full, 1, full.whole_s
        if self.overlaps and self.load.num_requests > 1:
            half = self._seconds_of(-(-self.load.num_requests // 2), k)
            if round_s > _GAIN * 2 * half.interval_s:
                seconds, num_microbatches, round_s = half, 2, 2 * half.interval_s
        return LengthForecast(
            num_draft_tokens=k,
            draft_s=seconds.draft_s,
            transfer_s=seconds.transfer_s,
            verify_s=seconds.verify_s,
            host_s=seconds.host_s,
            num_microbatches=num_microbatches,
            round_s=round_s,
            expected_tokens=expected_tokens,
            tokens_per_s=self.load.num_requests * expected_tokens / round_s,
        )

    def _seconds_of(self, num_requests: int, k: int) -> "_StageSeconds":
        batch = Batch(num_requests=num_requests, context_tokens=self.load.context_tokens)
        return _StageSeconds(
            draft_s=self.times.draft_s(batch, k),
            transfer_s=self.times.transfer_s(batch, k),
            verify_s=self.times.verify_s(batch, k),
            host_s=self.times.round_host_s(batch, k),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageSeconds:
    draft_s: float
    transfer_s: float
    verify_s: float
    host_s: float

    @property
    def whole_s(self) -> float:
        return self.draft_s + self.transfer_s + self.verify_s + self.host_s

    @property
    def interval_s(self) -> float:
        """Between two rounds of microbatches that take turns: the busier stage limits them."""
        return max(self.draft_s + self.host_s, self.verify_s, self.whole_s / 2)


def replicas_of(num_ranks: int, *, num_gpus: int, gpus_per_node: int) -> int:
    """Returns how many groups of so many ranks the GPUs hold; one that fits a node has its ranks on
    one."""
    if num_ranks > gpus_per_node or num_gpus <= gpus_per_node:
        return num_gpus // num_ranks
    return num_gpus // gpus_per_node * (gpus_per_node // num_ranks)


def share_of(load: Load, num_replicas: int) -> Load:
    """Returns the load of the busiest of so many replicas."""
    return replace(load, num_requests=-(-load.num_requests // num_replicas))


def plain_forecasts(
    shape: ModelShape, *, machine: Machine, load: Load, num_gpus: int
) -> tuple[PlainForecast, ...]:
    """Returns every way to decode plainly on these GPUs that fits their memory, the fastest first.

    A degree is used by as many replicas as there is room for, and requests.
    """
    forecasts = list(_plain_forecasts(shape, machine=machine, load=load, num_gpus=num_gpus))
    return tuple(
        sorted(forecasts, key=lambda forecast: (-forecast.tokens_per_s, forecast.num_ranks))
    )


def _plain_forecasts(
    shape: ModelShape, *, machine: Machine, load: Load, num_gpus: int
) -> Iterator[PlainForecast]:
    times = StageTimes(shape=shape, machine=machine, split=Split(exit_layer=0))
    for ranks in degrees_of(shape):
        max_replicas = replicas_of(
            ranks, num_gpus=num_gpus, gpus_per_node=machine.network.gpus_per_node
        )
        replicas = min(max_replicas, load.num_requests)
        if not replicas:
            continue
        share = share_of(load, replicas)
        memory = memory_of_plain(shape, num_ranks=ranks, load=share)
        if not memory.fits(machine.memory_bytes):
            continue
        batch = Batch(num_requests=share.num_requests, context_tokens=load.context_tokens)
        step_s = times.target_s(shape.num_layers, ranks=ranks, batch=batch, rows_per_request=1)
        step_s += times.round_host_s(batch, 0)
        yield PlainForecast(
            num_ranks=ranks,
            num_replicas=replicas,
            step_s=step_s,
            tokens_per_s=load.num_requests / step_s,
        )


def degrees_of(shape: ModelShape) -> tuple[int, ...]:
    return tensor_parallel_degrees(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        num_channels=shape.intermediate_size,
        norms_heads_jointly=shape.norms_heads_jointly,
    )
