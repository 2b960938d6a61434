"""Fits the parameters of a machine to measured costs of an engine.

Products and attention were measured alone: their times give the rates at which a rank reads,
multiplies and attends, which hold for every degree of tensor parallelism. What a stage takes in
addition is fitted as a time per layer, per row and per request, and charged to every rank in full:
norms, residual sums and calls are not shared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cluster.planning.machine import Arithmetic, AttentionTimes, HostTimes, Machine
from cluster.planning.shapes import ModelShape, Split
from cluster.planning.stage_times import Batch, StageTimes
from eesd_dist.bench.costs.form import (
    AttentionCost,
    MeasuredModel,
    ProductCost,
    RoundCost,
    StageCosts,
)
from eesd_dist.errors import ConfigError

_ITERATIONS = 20
_Floats = npt.NDArray[np.float64]


def fit(machine: Machine, shape: ModelShape, costs: StageCosts) -> Machine:
    """Returns the machine with arithmetic and host times fitted; its network stays.

    Raises ConfigError for costs of another model, or too few of them.
    """
    _require_model(shape, costs.model)
    if costs.verify_tensor_parallel_size != 1 or costs.draft_tensor_parallel_size != 1:
        raise ConfigError(
            f"costs of {costs.draft_tensor_parallel_size} draft and "
            f"{costs.verify_tensor_parallel_size} verify ranks: found a stage of several ranks, "
            "expected one rank each, so that no sums over ranks are in the costs: measure with "
            "`eesd bench costs --verify-tp 1`"
        )
    lengths = {cost.num_draft_tokens for cost in costs.rounds}
    batches = {cost.num_requests for cost in costs.rounds}
    if len(lengths) < 2 or len(batches) < 2 or not costs.products or not costs.attention:
        raise ConfigError(
            f"costs of batches {sorted(batches)} and draft lengths {sorted(lengths)}, "
            f"{len(costs.products)} products and {len(costs.attention)} times of attention: "
            "expected at least two batches, two lengths, products and attention: measure with "
            "`eesd bench costs`"
        )
    bare = replace(
        machine,
        arithmetic=replace(
            fit_products(costs.products, bytes_per_weight=costs.bytes_per_weight),
            attention=fit_attention(costs.attention),
        ),
        host=HostTimes(**dict.fromkeys(HostTimes.__dataclass_fields__, 0.0)),
    )
    split = Split(exit_layer=costs.model.exit_layer, draft_vocab_size=costs.model.draft_vocab_size)
    staged = _fit_stages(_Fit(shape, split, bare), costs.rounds)
    return _fit_host(_Fit(shape, split, staged), costs.rounds, hop_s=machine.host.hop_s)


def fit_products(products: Sequence[ProductCost], *, bytes_per_weight: int) -> Arithmetic:
    """Fits the call, the reading and the multiplying of `Arithmetic.product_of`.

    Each product is bound by one of the two under the present rates; these are fitted until no
    product changes sides.
    """
    weights = np.array([product.num_in * product.num_out for product in products], dtype=np.float64)
    rows = np.array([product.num_rows for product in products], dtype=np.float64)
    seconds = np.array([product.seconds for product in products])
    is_read = rows <= np.median(rows)
    coefficients = np.zeros(3)
    for _ in range(_ITERATIONS):
        columns = np.stack(
            [np.ones_like(rows), weights * is_read, weights * rows * ~is_read], axis=1
        )
        coefficients = positive_fit(columns, seconds, errors_in=seconds)
        is_read_next = coefficients[1] >= coefficients[2] * rows
        if (is_read_next == is_read).all():
            break
        is_read = is_read_next
    return Arithmetic(
        product_s=float(coefficients[0]),
        memory_bytes_per_s=bytes_per_weight / max(float(coefficients[1]), 1e-18),
        flops_per_s=2.0 / max(float(coefficients[2]), 1e-18),
    )


def fit_attention(costs: Sequence[AttentionCost]) -> AttentionTimes:
    """Fits the call, and what a head takes for each request, row and key."""
    columns = [
        [
            1.0,
            cost.num_heads * cost.num_requests,
            cost.num_heads * cost.num_requests * cost.rows_each,
            cost.num_heads * cost.num_requests * cost.rows_each * cost.context_tokens,
        ]
        for cost in costs
    ]
    seconds = np.array([cost.seconds for cost in costs])
    coefficients = positive_fit(np.array(columns, float), seconds, errors_in=seconds)
    call_s, request_s, row_s, key_s = map(float, coefficients)
    return AttentionTimes(call_s=call_s, request_s=request_s, row_s=row_s, key_s=key_s)


def positive_fit(columns: _Floats, targets: _Floats, *, errors_in: _Floats) -> _Floats:
    """Returns the coefficients, none negative, with the least squared error of `targets`
    relative to `errors_in`.

    The most negative coefficient is set to 0 and the others are fitted again, until none is.
    """
    weighted, goal = columns / errors_in[:, None], targets / errors_in
    indices = [at for at in range(columns.shape[1]) if columns[:, at].any()]
    result = np.zeros(columns.shape[1])
    while indices:
        solution, *_ = np.linalg.lstsq(weighted[:, indices], goal, rcond=None)
        if (solution >= 0.0).all():
            result[indices] = solution
            break
        del indices[int(solution.argmin())]
    return result


@dataclass(frozen=True, slots=True)
class _Fit:
    """A machine that explains a part of the measured rounds, and the time that is left."""

    shape: ModelShape
    split: Split
    machine: Machine

    def left(
        self,
        rounds: Sequence[RoundCost],
        measured: Callable[[RoundCost], float],
        explained: Callable[[StageTimes, Batch, int], float],
    ) -> _Floats:
        times = StageTimes(shape=self.shape, machine=self.machine, split=self.split)
        return np.array(
            [
                max(measured(cost) - explained(times, _batch(cost), cost.num_draft_tokens), 0.0)
                for cost in rounds
            ]
        )


def _fit_stages(fit: _Fit, rounds: Sequence[RoundCost]) -> Machine:
    """Fits what a verify pass takes besides its products."""
    layers = fit.shape.num_layers - fit.split.exit_layer
    layer_s, row_s, request_s = positive_fit(
        np.array([[layers, layers * cost.num_rows, cost.num_requests] for cost in rounds], float),
        fit.left(rounds, lambda cost: cost.verify_s, StageTimes.verify_s),
        errors_in=np.array([cost.verify_s for cost in rounds]),
    )
    machine = fit.machine
    return replace(
        machine,
        arithmetic=replace(machine.arithmetic, layer_s=float(layer_s), row_s=float(row_s)),
        host=replace(machine.host, verify_request_s=float(request_s)),
    )


def _fit_host(fit: _Fit, rounds: Sequence[RoundCost], *, hop_s: float) -> Machine:
    """Fits the host's part of drafting and of a round."""
    drafting = positive_fit(
        np.array([_drafting_of(cost) for cost in rounds], float),
        fit.left(rounds, lambda cost: cost.draft_s, StageTimes.draft_s),
        errors_in=np.array([cost.draft_s for cost in rounds]),
    )
    prefix_s, prefix_request_s, first_s, step_s, step_request_s = map(float, drafting)
    remainder_s = [max(cost.round_s - cost.draft_s - cost.verify_s, 0.0) for cost in rounds]
    of_round = positive_fit(
        np.array([[1.0, cost.num_requests, cost.num_rows] for cost in rounds], float),
        np.array(remainder_s),
        errors_in=np.array([cost.round_s for cost in rounds]),
    )
    round_s, round_request_s, round_row_s = map(float, of_round)
    host = replace(
        fit.machine.host,
        prefix_s=prefix_s,
        prefix_request_s=prefix_request_s,
        first_s=first_s,
        step_s=step_s,
        step_request_s=step_request_s,
        # Both messages of a round are in what was measured.
        round_s=max(round_s - 2 * hop_s, 0.0),
        round_request_s=round_request_s,
        round_row_s=round_row_s,
        hop_s=hop_s,
    )
    return replace(fit.machine, host=host)


def _drafting_of(cost: RoundCost) -> list[float]:
    requests, length = cost.num_requests, cost.num_draft_tokens
    return [1.0, requests, float(length > 0), length, length * requests]


def _batch(cost: RoundCost) -> Batch:
    return Batch(num_requests=cost.num_requests, context_tokens=cost.context_tokens)


def _require_model(shape: ModelShape, model: MeasuredModel) -> None:
    measured = (
        model.num_layers,
        model.hidden_size,
        model.intermediate_size,
        model.num_heads,
        model.num_kv_heads,
        model.vocab_size,
    )
    expected = (
        shape.num_layers,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.vocab_size,
    )
    if measured != expected or not 1 <= model.exit_layer < model.num_layers:
        raise ConfigError(
            f"costs of a model with layers, widths, heads and vocabulary {measured} and exit layer "
            f"{model.exit_layer}, expected those of the planned model, {expected}: measure its "
            "costs with `eesd bench costs --model`"
        )
