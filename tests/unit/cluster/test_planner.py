import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planning.planner import Plan, plan, render
from cluster.planning.shapes import Load, Machine, ModelShape, Split
from eesd_dist.errors import ConfigError
from serve_app.cli.main import main

LLAMA_70B = ModelShape(
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
)
EIGHT_GPUS = Split(exit_layer=8, verify_tensor_parallel_size=8)
ALONE = Load(num_requests=1, context_tokens=0)


def _plan(split: Split, load: Load = ALONE, machine: Machine | None = None) -> Plan:
    return plan(LLAMA_70B, machine=machine or Machine(), split=split, load=load)


def test_the_weights_of_a_70b_layer_are_counted() -> None:
    assert LLAMA_70B.layer_weights == 855_638_016
    total = 80 * LLAMA_70B.layer_weights + 2 * 8192 * 32000
    assert total == pytest.approx(68.98e9, rel=0.01)


def test_a_deep_exit_on_one_gpu_loses_against_eight() -> None:
    forecast = _plan(EIGHT_GPUS)
    assert forecast.draft_step_s == pytest.approx(4.7e-3, rel=0.05)
    assert forecast.plain_step_s == pytest.approx(5.1e-3, rel=0.02)
    assert not forecast.pays
    assert "does not pay" in render(forecast)


def test_a_shallow_exit_pays() -> None:
    forecast = _plan(replace(EIGHT_GPUS, exit_layer=2))
    assert forecast.pays
    assert forecast.break_even_acceptance is not None
    assert forecast.break_even_acceptance < 0.8
    assert f"{forecast.speedup:.2f}x" in render(forecast)


def test_slow_all_reduce_on_the_verify_side_makes_speculation_win_more() -> None:
    split = replace(EIGHT_GPUS, exit_layer=3)
    slow = _plan(split, machine=Machine(verify_all_reduce_s=50e-6))
    assert slow.speedup > _plan(split).speedup


def test_draft_ranks_and_a_smaller_vocabulary_shorten_the_draft_step() -> None:
    one = _plan(EIGHT_GPUS).draft_step_s
    two = _plan(replace(EIGHT_GPUS, draft_tensor_parallel_size=2)).draft_step_s
    small = _plan(replace(EIGHT_GPUS, draft_vocab_size=8000)).draft_step_s
    assert two == pytest.approx(one / 2)
    assert small < one


def test_a_single_rank_waits_for_no_other() -> None:
    split = Split(exit_layer=4)
    waiting = Machine(verify_all_reduce_s=1.0, draft_all_reduce_s=1.0)
    assert _plan(split, machine=waiting).plain_step_s == _plan(split).plain_step_s


def test_two_microbatches_hide_the_shorter_stage() -> None:
    split = replace(EIGHT_GPUS, exit_layer=2)
    one = _plan(split, load=replace(ALONE, num_requests=1)).best.tokens_per_s
    two = _plan(split, load=replace(ALONE, num_requests=2)).best.tokens_per_s
    assert 1.2 * one < two <= 2.01 * one


def test_a_large_batch_is_bound_by_arithmetic_and_stops_paying() -> None:
    split = replace(EIGHT_GPUS, exit_layer=2)
    crowd = replace(ALONE, num_requests=2048)
    assert _plan(split, load=crowd).speedup < _plan(split).speedup


def test_the_cost_model_agrees_with_the_forecast_for_one_request() -> None:
    forecast = _plan(replace(EIGHT_GPUS, exit_layer=2))
    for row in forecast.lengths:
        whole_s = row.draft_s + row.transfer_s + row.verify_s
        assert forecast.cost.seconds(row.num_draft_tokens) == pytest.approx(whole_s, rel=1e-3)


def test_with_no_drafting_there_is_nothing_to_break_even() -> None:
    forecast = _plan(EIGHT_GPUS, load=replace(ALONE, max_draft_tokens=0))
    assert forecast.break_even_acceptance is None
    assert [row.num_draft_tokens for row in forecast.lengths] == [0]
    assert not forecast.pays


@settings(max_examples=30)
@given(
    exit_layer=st.integers(1, 79),
    acceptance=st.floats(0.0, 1.0),
    requests=st.integers(1, 64),
)
def test_break_even_divides_what_pays_from_what_does_not(
    exit_layer: int, acceptance: float, requests: int
) -> None:
    load = Load(num_requests=requests, acceptance=acceptance, max_draft_tokens=6)
    forecast = _plan(Split(exit_layer=exit_layer, verify_tensor_parallel_size=4), load=load)
    threshold = forecast.break_even_acceptance
    if threshold is None:
        assert not forecast.pays
    elif abs(acceptance - threshold) > 1e-6:
        assert forecast.pays == (acceptance > threshold)
    expected = [row.expected_tokens for row in forecast.lengths]
    assert all(a <= b for a, b in pairwise(expected))


@pytest.mark.parametrize("exit_layer", [0, 80])
def test_an_exit_outside_the_model_is_refused(exit_layer: int) -> None:
    with pytest.raises(ConfigError, match="choose 1 to 79"):
        _plan(Split(exit_layer=exit_layer))


def test_the_command_prints_a_table_and_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    fields = {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    config.write_text(json.dumps(fields))
    arguments = ["plan", "--config", str(config), "--verify-tp", "8"]
    assert main([*arguments, "--exit-layer", "2"]) == 0
    assert "speculation pays" in capsys.readouterr().out
    assert main([*arguments, "--exit-layer", "99"]) == 2
    assert "choose 1 to 79" in capsys.readouterr().err
