"""The fit finds the parameters of costs that a known machine made."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed

from cluster.planning.fitting import fit, fit_attention, fit_products, positive_fit
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

SHAPE = ModelShape(
    num_layers=32,
    hidden_size=192,
    intermediate_size=448,
    num_heads=8,
    num_kv_heads=4,
    head_dim=24,
    vocab_size=4096,
    bytes_per_kv=4,
    bytes_per_activation=4,
)
MODEL = MeasuredModel(
    num_layers=32,
    hidden_size=192,
    intermediate_size=448,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=4096,
    exit_layer=2,
    draft_vocab_size=2048,
)
TRUE = Machine(
    arithmetic=Arithmetic(
        memory_bytes_per_s=2e10,
        flops_per_s=1e11,
        product_s=2e-6,
        layer_s=1e-4,
        row_s=3e-6,
        attention=AttentionTimes(call_s=1e-5, request_s=4e-7, row_s=2e-7, key_s=2e-9),
    ),
    host=HostTimes(
        step_s=2e-4,
        step_request_s=4e-5,
        first_s=5e-4,
        prefix_s=6e-4,
        prefix_request_s=1e-5,
        round_s=1e-3,
        round_request_s=2e-5,
        round_row_s=1e-5,
        verify_s=0.0,
        verify_request_s=2e-4,
        hop_s=1e-4,
    ),
)


def _products(arithmetic: Arithmetic) -> tuple[ProductCost, ...]:
    return tuple(
        ProductCost(
            num_in=num_in,
            num_out=num_out,
            num_rows=rows,
            seconds=arithmetic.product_of(2 * num_in * num_out, flops=2 * num_in * num_out * rows),
        )
        for num_in, num_out in ((192, 384), (192, 896), (448, 192), (192, 4096))
        for rows in (1, 4, 9, 24, 72)
    )


def _attention(times: AttentionTimes) -> tuple[AttentionCost, ...]:
    return tuple(
        AttentionCost(
            num_heads=8,
            num_requests=requests,
            rows_each=rows,
            context_tokens=context,
            seconds=times.seconds(
                num_heads=8, requests=requests, rows=requests * rows, context=context
            ),
        )
        for requests in (1, 8)
        for rows in (1, 9)
        for context in (64, 256)
    )


def _round(times: StageTimes, requests: int, length: int) -> RoundCost:
    batch = Batch(num_requests=requests, context_tokens=60)
    draft_s, verify_s = times.draft_s(batch, length), times.verify_s(batch, length)
    host_s = times.round_host_s(batch, length) + 2 * times.machine.host.hop_s
    return RoundCost(
        num_requests=requests,
        num_draft_tokens=length,
        context_tokens=60,
        draft_s=draft_s,
        verify_s=verify_s,
        round_s=draft_s + verify_s + host_s,
        tokens_per_round=float(requests),
        num_rounds=10,
    )


def _costs(machine: Machine = TRUE) -> StageCosts:
    split = Split(exit_layer=MODEL.exit_layer, draft_vocab_size=MODEL.draft_vocab_size)
    times = StageTimes(shape=SHAPE, machine=machine, split=split)
    assert machine.arithmetic.attention is not None
    return StageCosts(
        model=MODEL,
        device="cpu",
        bytes_per_weight=2,
        draft_tensor_parallel_size=1,
        verify_tensor_parallel_size=1,
        num_threads=1,
        products=_products(machine.arithmetic),
        attention=_attention(machine.arithmetic.attention),
        rounds=tuple(_round(times, batch, k) for batch in (1, 8) for k in (0, 1, 2, 4, 8)),
    )


def test_the_rates_of_products_are_found_again() -> None:
    arithmetic = fit_products(_products(TRUE.arithmetic), bytes_per_weight=2)
    assert arithmetic.memory_bytes_per_s == pytest.approx(2e10, rel=1e-6)
    assert arithmetic.flops_per_s == pytest.approx(1e11, rel=1e-6)
    assert arithmetic.product_s == pytest.approx(2e-6, rel=1e-6)


def test_the_times_of_attention_are_found_again() -> None:
    true = TRUE.arithmetic.attention
    assert true is not None
    times = fit_attention(_attention(true))
    for name in AttentionTimes.__dataclass_fields__:
        assert getattr(times, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_other_degrees_batches_and_lengths_are_predicted_from_two_batches_of_one_rank() -> None:
    fitted = fit(replace(Machine(), host=replace(HostTimes(), hop_s=1e-4)), SHAPE, _costs())
    for ranks in (1, 2, 4):
        split = Split(exit_layer=2, verify_tensor_parallel_size=ranks, draft_vocab_size=2048)
        true = StageTimes(shape=SHAPE, machine=TRUE, split=split)
        predicted = StageTimes(shape=SHAPE, machine=fitted, split=split)
        for requests in (1, 4, 16):
            batch = Batch(num_requests=requests, context_tokens=60)
            for k in (0, 3, 8):
                # A product of few rows may be bound by the other rate on the true machine.
                assert predicted.verify_s(batch, k) == pytest.approx(
                    true.verify_s(batch, k), rel=0.02
                )
                assert predicted.draft_s(batch, k) == pytest.approx(
                    true.draft_s(batch, k), rel=0.02
                )
                host = predicted.round_host_s(batch, k), true.round_host_s(batch, k)
                assert host[0] == pytest.approx(host[1], rel=0.02)


def test_a_machine_of_twice_the_speed_is_predicted_to_take_half_the_time() -> None:
    costs = _costs()
    half = _of_half_the_time(costs)
    slow, fast = (
        fit(Machine(host=replace(HostTimes(), hop_s=0.0)), SHAPE, c) for c in (costs, half)
    )
    split = Split(exit_layer=2)
    batch = Batch(num_requests=4, context_tokens=60)
    times = [
        StageTimes(shape=SHAPE, machine=m, split=split).verify_s(batch, 4) for m in (slow, fast)
    ]
    assert times[1] == pytest.approx(times[0] / 2, rel=1e-6)


def _of_half_the_time(costs: StageCosts) -> StageCosts:
    return changed(
        costs,
        products=tuple(changed(cost, seconds=cost.seconds / 2) for cost in costs.products),
        attention=tuple(changed(cost, seconds=cost.seconds / 2) for cost in costs.attention),
        rounds=tuple(
            changed(
                cost,
                draft_s=cost.draft_s / 2,
                verify_s=cost.verify_s / 2,
                round_s=cost.round_s / 2,
            )
            for cost in costs.rounds
        ),
    )


def test_no_fitted_time_is_negative() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    falling = np.array([4.0, 3.0, 1.0])
    coefficients = positive_fit(columns, falling, errors_in=np.ones(3))
    assert coefficients == pytest.approx([8.0 / 3.0, 0.0])


def test_costs_of_another_model_or_too_few_are_refused() -> None:
    costs = _costs()
    other = changed(costs, model=changed(MODEL, hidden_size=256))
    with pytest.raises(ConfigError, match="expected those of the planned model"):
        fit(Machine(), SHAPE, other)
    with pytest.raises(ConfigError, match="at least two batches"):
        fit(Machine(), SHAPE, changed(costs, rounds=costs.rounds[:5]))
    with pytest.raises(ConfigError, match="expected one rank each"):
        fit(Machine(), SHAPE, changed(costs, verify_tensor_parallel_size=2))
