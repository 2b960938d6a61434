from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planning.forecast import PipelineForecast, plain_forecasts, replicas_of
from cluster.planning.machine import Arithmetic, HostTimes, Machine
from cluster.planning.network import Network
from cluster.planning.planner import Plan, plan
from cluster.planning.presets import Link
from cluster.planning.report import render, verdict
from cluster.planning.shapes import Acceptance, Load, ModelShape, Split, named_shape
from cluster.planning.stage_times import Batch, StageTimes
from eesd_dist.errors import ConfigError

LLAMA_70B = ModelShape(
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
)
NO_HOST = HostTimes(**dict.fromkeys(HostTimes.__dataclass_fields__, 0.0))
FREE = Network(
    intra=Link(hop_s=0.0, bytes_per_s=1e15),
    inter=Link(hop_s=0.0, bytes_per_s=1e15),
    collective_s=0.0,
)
IDEAL = Machine(host=NO_HOST, network=FREE)
"""Peaks alone: no host, no sums, as in decision 4."""
EIGHT_GPUS = Split(exit_layer=8, verify_tensor_parallel_size=8)
ALONE = Load(num_requests=1, context_tokens=0)
USUAL = Acceptance(rate=0.8)


def _plan(
    split: Split, load: Load = ALONE, machine: Machine = IDEAL, acceptance: Acceptance = USUAL
) -> Plan:
    return plan(
        LLAMA_70B,
        machine=machine,
        split=split,
        load=load,
        acceptance=acceptance,
        num_gpus=split.num_gpus,
    )


def _times(machine: Machine, split: Split) -> StageTimes:
    return StageTimes(shape=LLAMA_70B, machine=machine, split=split)


def test_the_weights_of_a_70b_layer_are_counted() -> None:
    assert LLAMA_70B.layer_weights == 855_638_016
    total = 80 * LLAMA_70B.layer_weights + 2 * 8192 * 32000
    assert total == pytest.approx(68.98e9, rel=0.01)


def test_a_deep_exit_on_one_gpu_loses_against_eight() -> None:
    forecast = _plan(EIGHT_GPUS)
    assert forecast.draft_step_s == pytest.approx(4.7e-3, rel=0.05)
    assert forecast.plain[0].num_ranks == 8
    assert forecast.plain[0].step_s == pytest.approx(5.1e-3, rel=0.02)
    assert not forecast.pays
    text = verdict(forecast)
    assert "does not pay here at an assumed acceptance of 0.80" in text
    assert "the fastest plain decoding on all 9 GPUs of 2 nodes, by TP 8" in text


def test_a_shallow_exit_pays() -> None:
    forecast = _plan(replace(EIGHT_GPUS, exit_layer=2))
    assert forecast.pays
    assert forecast.break_even_acceptance is not None
    assert forecast.break_even_acceptance < 0.8
    assert f"{forecast.speedup:.2f}x" in render(forecast)


def test_slow_sums_on_the_verify_side_make_speculation_win_more() -> None:
    split = replace(EIGHT_GPUS, exit_layer=3)
    slow = _plan(split, machine=replace(IDEAL, verify_sum_s=50e-6))
    assert slow.speedup > _plan(split).speedup


def test_draft_ranks_and_a_smaller_vocabulary_shorten_the_draft_step() -> None:
    single_s = _plan(EIGHT_GPUS).draft_step_s
    double_s = _plan(replace(EIGHT_GPUS, draft_tensor_parallel_size=2)).draft_step_s
    small = _plan(replace(EIGHT_GPUS, draft_vocab_size=8000)).draft_step_s
    assert double_s == pytest.approx(single_s / 2, rel=1e-6)
    assert small < single_s


def test_a_single_rank_waits_for_no_other() -> None:
    split = Split(exit_layer=4)
    waiting = replace(IDEAL, verify_sum_s=1.0, draft_sum_s=1.0)
    assert _plan(split, machine=waiting).verify_pass_s == _plan(split).verify_pass_s
    assert _plan(split, machine=waiting).draft_step_s == _plan(split).draft_step_s


def test_a_group_over_nodes_waits_for_its_host_to_queue_each_sum() -> None:
    host = replace(NO_HOST, queued_sum_s=1e-3)
    batch = Batch(num_requests=1, context_tokens=0)
    on_a_node, over_nodes = (
        _times(replace(IDEAL, host=host), replace(EIGHT_GPUS, verify_tensor_parallel_size=ranks))
        for ranks in (8, 16)
    )
    assert on_a_node.verify_s(batch, 0) == _times(IDEAL, EIGHT_GPUS).verify_s(batch, 0)
    assert over_nodes.verify_s(batch, 0) == pytest.approx(72 * 2 * 1e-3, rel=0.01)


def test_two_microbatches_pay_where_rows_are_bound_by_arithmetic() -> None:
    split = replace(EIGHT_GPUS, exit_layer=8)
    crowd = replace(ALONE, num_requests=2048)
    row = _plan(split, load=crowd).lengths[1]
    times = _times(IDEAL, split)
    half = Batch(num_requests=1024, context_tokens=0)
    assert row.num_microbatches == 2
    assert row.round_s >= 2 * max(times.draft_s(half, 1), times.verify_s(half, 1))
    sequential = PipelineForecast(times=times, load=crowd, overlaps=False).lengths(USUAL)[1]
    assert sequential.round_s > 1.05 * row.round_s


def test_one_batch_is_kept_where_each_microbatch_would_read_the_weights_again() -> None:
    forecast = _plan(EIGHT_GPUS, load=replace(ALONE, num_requests=8))
    assert {row.num_microbatches for row in forecast.lengths} == {1}


def test_a_microbatch_reads_the_keys_and_values_of_its_own_requests() -> None:
    times = _times(IDEAL, EIGHT_GPUS)
    for length in (0, 4):  # drafted rows of a request share its keys and values
        empty, short, long = (
            times.verify_s(Batch(num_requests=4, context_tokens=tokens), length)
            - times.verify_s(Batch(num_requests=4, context_tokens=0), length)
            for tokens in (0, 8192, 4 * 8192)
        )
        assert empty == 0.0
        kv_bytes = 72 * 4 * 8192 * LLAMA_70B.kv_bytes_per_token_of(8)
        assert short == pytest.approx(kv_bytes / 3.35e12)
        assert long == pytest.approx(4 * short)
    crowd = _plan(EIGHT_GPUS, Load(num_requests=2048, context_tokens=64))
    row = crowd.lengths[4]
    assert row.num_microbatches == 2
    assert row.verify_s == times.verify_s(Batch(num_requests=1024, context_tokens=64), 4)


def test_a_large_batch_is_bound_by_arithmetic_and_stops_paying() -> None:
    split = replace(EIGHT_GPUS, exit_layer=2)
    crowd = replace(ALONE, num_requests=4096)
    assert _plan(split, load=crowd).speedup < _plan(split).speedup


def test_host_time_is_paid_for_every_drafted_token_and_every_round() -> None:
    host = replace(NO_HOST, step_s=1.0, step_request_s=0.25, round_s=100.0, hop_s=10.0)
    with_host = _plan(EIGHT_GPUS, machine=replace(IDEAL, host=host))
    for row, bare in zip(with_host.lengths, _plan(EIGHT_GPUS).lengths, strict=True):
        more = row.round_s - bare.round_s
        # 3 hops: to verify rank 0, to the other verify ranks, and back.
        assert more == pytest.approx(130.0 + 1.25 * row.num_draft_tokens)


def test_with_no_drafting_there_is_nothing_to_break_even() -> None:
    forecast = _plan(EIGHT_GPUS, load=replace(ALONE, max_draft_tokens=0))
    assert forecast.break_even_acceptance is None
    assert [row.num_draft_tokens for row in forecast.lengths] == [0]
    assert not forecast.pays


def test_plain_decoding_gets_the_draft_ranks_too() -> None:
    split = Split(exit_layer=4, draft_tensor_parallel_size=8, verify_tensor_parallel_size=8)
    forecast = _plan(split)
    assert forecast.num_gpus == 16
    assert forecast.plain[0].num_ranks == 16
    assert forecast.plain_tokens_per_s == forecast.plain[0].tokens_per_s


def test_more_replicas_beat_one_wide_group_when_many_requests_are_served() -> None:
    crowd = Load(num_requests=256, context_tokens=2048)
    slow_network = Machine(network=Network(inter=Link(hop_s=30e-6, bytes_per_s=3e9)))
    forecasts = plain_forecasts(LLAMA_70B, machine=slow_network, load=crowd, num_gpus=16)
    assert forecasts[0].num_replicas > 1
    wide = next(forecast for forecast in forecasts if forecast.num_ranks == 16)
    assert forecasts[0].tokens_per_s > wide.tokens_per_s
    single = plain_forecasts(LLAMA_70B, machine=slow_network, load=ALONE, num_gpus=16)
    assert {forecast.num_replicas for forecast in single} == {1}


def test_a_plain_group_that_does_not_fit_the_memory_is_no_alternative() -> None:
    small = replace(IDEAL, memory_bytes=40e9)
    forecasts = plain_forecasts(LLAMA_70B, machine=small, load=ALONE, num_gpus=8)
    assert sorted(forecast.num_ranks for forecast in forecasts) == [4, 8]


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "expected"),
    [(4, 8, 2), (5, 16, 2), (9, 16, 1), (16, 16, 1), (17, 16, 0), (3, 7, 2)],
)
def test_groups_that_fit_a_node_stay_in_one(num_ranks: int, num_gpus: int, expected: int) -> None:
    assert replicas_of(num_ranks, num_gpus=num_gpus, gpus_per_node=8) == expected


def test_a_split_that_does_not_fit_the_memory_is_refused_with_figures() -> None:
    with pytest.raises(ConfigError, match=r"a verify rank of 1 needs 13\d\.\d GB .* at most 72.0"):
        _plan(Split(exit_layer=2), machine=replace(IDEAL, memory_bytes=72e9))


@settings(max_examples=30)
@given(
    exit_layer=st.integers(1, 79),
    acceptance=st.floats(0.0, 1.0),
    requests=st.integers(1, 64),
)
def test_break_even_divides_what_pays_from_what_does_not(
    exit_layer: int, acceptance: float, requests: int
) -> None:
    load = Load(num_requests=requests, max_draft_tokens=6)
    split = Split(exit_layer=exit_layer, verify_tensor_parallel_size=4)
    forecast = _plan(split, load, Machine(), Acceptance(rate=acceptance))
    threshold = forecast.break_even_acceptance
    if threshold is None:
        assert not forecast.pays
    elif abs(acceptance - threshold) > 1e-6:
        assert forecast.pays == (acceptance > threshold)
    expected = [row.expected_tokens for row in forecast.lengths]
    assert all(a <= b for a, b in pairwise(expected))


@settings(max_examples=50)
@given(
    requests=st.integers(1, 300),
    length=st.integers(0, 8),
    context=st.integers(0, 10_000),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_more_of_anything_takes_no_less_time(
    requests: int, length: int, context: int, ranks: int
) -> None:
    times = _times(Machine(), Split(exit_layer=4, verify_tensor_parallel_size=ranks))
    batch = Batch(num_requests=requests, context_tokens=context)
    more = Batch(num_requests=requests + 1, context_tokens=context + 100)
    assert times.verify_s(batch, length) <= times.verify_s(more, length)
    assert times.verify_s(batch, length) <= times.verify_s(batch, length + 1)
    assert times.draft_s(batch, length) < times.draft_s(batch, length + 1)
    assert times.draft_s(batch, length) <= times.draft_s(more, length)


@pytest.mark.parametrize("exit_layer", [0, 80])
def test_an_exit_outside_the_model_is_refused(exit_layer: int) -> None:
    with pytest.raises(ConfigError, match="choose 1 to 79"):
        _plan(Split(exit_layer=exit_layer))


def test_measured_survival_replaces_the_acceptance_as_far_as_it_goes() -> None:
    measured = Acceptance(rate=0.5, survival=(0.9, 0.6), is_measured=True)
    assert measured.expected_tokens(3) == pytest.approx((1.0, 1.9, 2.5, 2.8))
    assert Acceptance(rate=0.5).expected_tokens(3) == pytest.approx((1.0, 1.5, 1.75, 1.875))


def test_a_product_takes_the_longer_of_reading_and_multiplying() -> None:
    arithmetic = Arithmetic(memory_bytes_per_s=100.0, flops_per_s=10.0, efficiency=0.5)
    assert arithmetic.product_of(200.0, flops=1.0) == pytest.approx(4.0)
    assert arithmetic.product_of(1.0, flops=40.0) == pytest.approx(8.0)


def test_a_pipeline_without_overlap_has_one_batch() -> None:
    times = _times(IDEAL, replace(EIGHT_GPUS, exit_layer=2))
    load = replace(ALONE, num_requests=2)
    rows = PipelineForecast(times=times, load=load, overlaps=False).lengths(USUAL)
    assert {row.num_microbatches for row in rows} == {1}
    for row in rows:
        total_s = row.draft_s + row.transfer_s + row.verify_s + row.host_s
        assert row.round_s == pytest.approx(total_s)


ONE_GPU = Split(exit_layer=4, shares_gpu=True)
LLAMA_8B = named_shape("llama-3-8b")


def _plan_8b(split: Split, load: Load = ALONE, memory_bytes: float | None = None) -> Plan:
    return plan(
        LLAMA_8B,
        machine=Machine(memory_bytes=memory_bytes),
        split=split,
        load=load,
        acceptance=USUAL,
        num_gpus=split.num_gpus,
    )


def test_stages_on_one_gpu_are_compared_with_one_gpu_and_take_turns() -> None:
    crowd = Load(num_requests=512, context_tokens=64)
    shared, apart = _plan_8b(ONE_GPU, crowd), _plan_8b(replace(ONE_GPU, shares_gpu=False), crowd)
    assert (shared.num_gpus, apart.num_gpus) == (1, 2)
    assert [row.num_ranks for row in shared.plain] == [1]
    assert {row.num_microbatches for row in shared.lengths} == {1}
    assert 2 in {row.num_microbatches for row in apart.lengths}


def test_stages_in_one_process_send_each_other_nothing() -> None:
    batch = Batch(num_requests=160, context_tokens=0)
    apart = replace(ONE_GPU, shares_gpu=False)
    seconds = [
        StageTimes(shape=LLAMA_8B, machine=Machine(), split=split).transfer_s(batch, 0)
        for split in (ONE_GPU, apart)
    ]
    assert seconds[0] == 0.0 < seconds[1]


def test_a_shared_gpu_has_the_memory_of_both_first_ranks() -> None:
    shared = _plan_8b(ONE_GPU)
    draft, verify = _plan_8b(replace(ONE_GPU, shares_gpu=False)).memories
    (both,) = shared.memories
    assert both.weights_bytes == draft.weights_bytes + verify.weights_bytes
    assert both.kv_bytes == draft.kv_bytes + verify.kv_bytes
    with pytest.raises(ConfigError, match=r"a shared rank of 1 needs .* at most 16\.0 GB: raise"):
        _plan_8b(ONE_GPU, memory_bytes=16e9)


def test_eight_verify_ranks_and_a_drafting_actor_have_eight_gpus() -> None:
    split = replace(ONE_GPU, verify_tensor_parallel_size=8)
    plan = _plan_8b(split)
    assert plan.num_gpus == 8
    assert [(rank.stage, rank.num_ranks) for rank in plan.memories] == [
        ("shared", 1),
        ("verify", 7),
    ]
