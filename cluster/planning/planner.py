"""Predicts whether speculation would pay on given machines: `eesd plan`.

Predicts a round from the dimensions of the model and a few figures of the machine: a layer takes
the time to read its weights and KV, or the time to multiply its rows, whichever is longer. It
measures nothing. The acceptance is an input; the acceptance at which speculation breaks even is
reported. Real kernels reach a part of the peak (`efficiency`); a start-up profile of the real
machine is more accurate.
"""

import sys
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from typer import echo

from cluster.planning.memory import RankMemory, memory_of, render_memory, with_fallbacks
from cluster.planning.options import PlanOptions
from cluster.planning.shapes import Load, Machine, ModelShape, Split, read_shape
from eesd_dist.command_line import run_command
from eesd_dist.control.cost import CostModel
from eesd_dist.errors import ConfigError
from eesd_dist.model.degrees import require_degree

_BISECTIONS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthForecast:
    """The forecast for one fixed draft length."""

    num_draft_tokens: int
    draft_s: float
    transfer_s: float
    verify_s: float
    expected_tokens: float
    """Per request and round."""
    tokens_per_s: float
    """Of all requests together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The forecast for one model, machine, split and load."""

    draft_step_s: float
    """One drafted token through [0, N) and the exit head."""
    verify_pass_s: float
    """Layers [N, L) and the LM head over one row of each request."""
    plain_step_s: float
    """Plain decoding with all layers on the verify ranks: the baseline without a draft stage."""
    plain_tokens_per_s: float
    cost: CostModel
    """The same in the form that controllers use, for one request."""
    lengths: tuple[LengthForecast, ...]
    """Draft lengths 0, 1, 2 ...; 0 is plain decoding over the two stages."""
    break_even_acceptance: float | None
    """Above it the best length is faster than both plain decodings; None: 1.0 is not enough."""

    @property
    def best(self) -> LengthForecast:
        return max(self.lengths, key=lambda row: (row.tokens_per_s, -row.num_draft_tokens))

    @property
    def speedup(self) -> float:
        """Speed of the best length over the faster of the two plain decodings."""
        return self.best.tokens_per_s / self._best_plain

    @property
    def pays(self) -> bool:
        return self.best.num_draft_tokens > 0 and self.speedup > 1.0

    @property
    def _best_plain(self) -> float:
        return max(self.plain_tokens_per_s, self.lengths[0].tokens_per_s)


def plan(shape: ModelShape, *, machine: Machine, split: Split, load: Load) -> Plan:
    """Predicts every draft length up to the maximum, and the break-even acceptance."""
    _require_fit(shape, split=split, load=load)
    forecast = _Forecast(shape=shape, machine=machine, split=split, load=load)
    plain_step_s = forecast.plain_step_s()
    plain_rate = load.num_requests / plain_step_s
    return Plan(
        draft_step_s=forecast.draft_step_s(load.microbatch_size),
        verify_pass_s=forecast.verify_s(load.microbatch_size),
        plain_step_s=plain_step_s,
        plain_tokens_per_s=plain_rate,
        cost=forecast.cost_model(),
        lengths=forecast.lengths(load.acceptance),
        break_even_acceptance=_break_even(forecast, plain_rate),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """The time of each part of a round; docs/decisions/0004 has the reasoning."""

    shape: ModelShape
    machine: Machine
    split: Split
    load: Load

    def draft_step_s(self, rows: int) -> float:
        """Returns the seconds of N layers, the layer of the exit head and its LM head."""
        vocabulary = self.split.draft_vocab_size or self.shape.vocab_size
        ranks = self.split.draft_tensor_parallel_size
        # Three commands to the other ranks and one gather of logits, each as long as a sum.
        waits_s = 4 * self.machine.draft_all_reduce_s if ranks > 1 else 0.0
        layers_s = self._draft_layers_s(self.split.exit_layer + 1, rows)
        head_weights = self.shape.hidden_size * vocabulary
        return layers_s + self._matrix_s(head_weights, rows=rows, ranks=ranks) + waits_s

    def verify_s(self, rows: int) -> float:
        num_layers = self.shape.num_layers - self.split.exit_layer
        return self._target_s(num_layers, rows)

    def transfer_s(self, rows: int) -> float:
        """Returns the seconds of sending hidden states; the reply is a few integers."""
        size_bytes = rows * self.shape.hidden_size * self.shape.bytes_per_weight
        return 2 * self.machine.link_latency_s + size_bytes / self.machine.link_bytes_per_s

    def plain_step_s(self) -> float:
        """Returns the seconds of one batch of all requests, with all layers on the verify ranks."""
        return self._target_s(self.shape.num_layers, self.load.num_requests)

    def lengths(self, acceptance: float) -> tuple[LengthForecast, ...]:
        survival = accumulate([acceptance] * self.load.max_draft_tokens, mul)
        # The verifier's token, and each drafted token times its survival.
        expected = accumulate(survival, initial=1.0)
        return tuple(self._length(k, tokens) for k, tokens in enumerate(expected))

    def cost_model(self) -> CostModel:
        """Returns the costs of one request in the form that controllers use."""
        alone = replace(self, load=replace(self.load, num_requests=1))
        return CostModel(
            draft_step_s=alone.draft_step_s(1),
            verify_s=tuple(
                alone.verify_s(rows) for rows in range(1, self.load.max_draft_tokens + 2)
            ),
            round_s=alone._draft_layers_s(self.split.exit_layer, 1) + alone.transfer_s(1),
        )

    def _length(self, k: int, expected_tokens: float) -> LengthForecast:
        microbatch = self.load.microbatch_size
        last_token_s = self._draft_layers_s(self.split.exit_layer, microbatch)
        draft_s = last_token_s + k * self.draft_step_s(microbatch)
        transfer_s = self.transfer_s(microbatch * (k + 1))
        verify_s = self.verify_s(microbatch * (k + 1))
        whole_s = draft_s + transfer_s + verify_s
        # With alternating microbatches, the busier stage limits the rate of rounds.
        interval_s = max(draft_s, verify_s, whole_s / self.load.num_microbatches)
        per_microbatch = self.load.num_requests / self.load.num_microbatches
        return LengthForecast(
            num_draft_tokens=k,
            draft_s=draft_s,
            transfer_s=transfer_s,
            verify_s=verify_s,
            expected_tokens=expected_tokens,
            tokens_per_s=per_microbatch * expected_tokens / interval_s,
        )

    def _draft_layers_s(self, num_layers: int, rows: int) -> float:
        ranks = self.split.draft_tensor_parallel_size
        wait_s = self.machine.draft_all_reduce_s if ranks > 1 else 0.0
        return num_layers * (self._layer_s(rows, ranks) + 2 * wait_s)

    def _target_s(self, num_layers: int, rows: int) -> float:
        """Returns the seconds of the last layers of the target and its LM head, on verify ranks."""
        ranks = self.split.verify_tensor_parallel_size
        wait_s = self.machine.verify_all_reduce_s if ranks > 1 else 0.0
        layers_s = num_layers * (self._layer_s(rows, ranks) + 2 * wait_s)
        head_weights = self.shape.hidden_size * self.shape.vocab_size
        return layers_s + self._matrix_s(head_weights, rows=rows, ranks=ranks) + wait_s

    def _layer_s(self, rows: int, ranks: int) -> float:
        # The rows of a request share its KV; different requests do not.
        requests = min(rows, self.load.num_requests)
        kv_bytes = requests * self.load.context_tokens * self.shape.kv_bytes_per_token_of(ranks)
        return self._matrix_s(self.shape.layer_weights_of(ranks), rows=rows, more_bytes=kv_bytes)

    def _matrix_s(self, weights: int, *, rows: int, ranks: int = 1, more_bytes: int = 0) -> float:
        """`weights` are shared evenly by the ranks, if there are several."""
        read_bytes = weights * self.shape.bytes_per_weight + more_bytes
        read_s = read_bytes / self.machine.memory_bytes_per_s
        multiply_s = 2 * weights * rows / self.machine.flops_per_s
        return max(read_s, multiply_s) / (ranks * self.machine.efficiency)


def _break_even(forecast: _Forecast, plain_rate: float) -> float | None:
    plain = max(plain_rate, forecast.lengths(0.0)[0].tokens_per_s)

    def wins(acceptance: float) -> bool:
        return max(row.tokens_per_s for row in forecast.lengths(acceptance)[1:]) > plain

    if forecast.load.max_draft_tokens == 0 or not wins(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def _require_fit(shape: ModelShape, *, split: Split, load: Load) -> None:
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
        )
    if not 0.0 <= load.acceptance <= 1.0:
        raise ConfigError(f"acceptance {load.acceptance} is not a probability: expected 0 to 1")
    if load.num_requests < 1:
        raise ConfigError(f"{load.num_requests} requests: expected at least 1")


def render(forecast: Plan) -> str:
    """Returns the forecast as text: three figures, a table, and a conclusion."""
    lines = [
        f"draft step   {_ms(forecast.draft_step_s)}   one drafted token",
        f"verify pass  {_ms(forecast.verify_pass_s)}   one row of each request",
        f"plain step   {_ms(forecast.plain_step_s)}   all layers on the verify ranks, "
        f"{forecast.plain_tokens_per_s:.0f} tokens/s",
        "",
        "length   draft ms  transfer ms  verify ms  tokens/round   tokens/s",
    ]
    lines += [
        f"{row.num_draft_tokens:>6}{row.draft_s * 1e3:>11.3f}{row.transfer_s * 1e3:>13.3f}"
        f"{row.verify_s * 1e3:>11.3f}{row.expected_tokens:>14.2f}{row.tokens_per_s:>11.0f}"
        for row in forecast.lengths
    ]
    return "\n".join([*lines, "", _verdict(forecast)])


def _verdict(forecast: Plan) -> str:
    threshold = forecast.break_even_acceptance
    needed = (
        "no acceptance would change that"
        if threshold is None
        else f"it breaks even at acceptance {threshold:.2f}"
    )
    if forecast.pays:
        length = forecast.best.num_draft_tokens
        return f"speculation pays: {forecast.speedup:.2f}x with drafts of {length}; {needed}"
    return f"speculation does not pay here: {needed}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.3f} ms"


def main(options: PlanOptions) -> None:
    """Prints the forecast for one model on one kind of machine."""
    split = Split(
        exit_layer=options.exit_layer,
        draft_tensor_parallel_size=options.draft_tp,
        verify_tensor_parallel_size=options.verify_tp,
        draft_vocab_size=options.draft_vocab_size,
    )
    load = Load(
        num_requests=options.requests,
        context_tokens=options.context,
        acceptance=options.acceptance,
        max_draft_tokens=options.max_draft_tokens,
    )
    shape = read_shape(options.config, on_cpu=options.on_cpu)
    forecast = plan(shape, machine=options.machine, split=split, load=load)
    stages = memory_of(shape, split=split, load=load)
    memories: tuple[RankMemory, ...] = stages
    if options.fallback:
        memories = with_fallbacks(stages, shape, split=split, load=load)
    echo(f"{render(forecast)}\n\n{render_memory(memories)}")


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], program="python -m cluster.planning.planner"))
