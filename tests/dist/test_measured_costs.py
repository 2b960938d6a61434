"""Costs measured over real processes: what is written can be read and planned with."""

import json
from pathlib import Path

import pytest

from eesd_dist.bench.costs.form import read_costs
from eesd_dist.bench.costs.measure import (
    RoundSetting,
    engine_config,
    measure_rounds,
    round_costs,
    survival_of,
)
from eesd_dist.bench.costs.rounds import RoundTimes
from eesd_dist.bench.options import SHIPPED_PROMPTS
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.control.cost import NOMINAL_COST
from eesd_dist.engine.build import build_local_engine
from eesd_dist.text.prompts import load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from serve_app.cli.main import main

BATCHES, LENGTHS, TOKENS = (1, 2), (0, 2), 20
SETTINGS = [
    RoundSetting(verify_tp=1, num_requests=batch, num_draft_tokens=length)
    for batch in BATCHES
    for length in LENGTHS
]


def _rounds_of_one_process() -> dict[RoundSetting, RoundTimes]:
    prompts = load_prompts(Tokenizer.load(BUNDLED_MODEL), SHIPPED_PROMPTS, limit=2)
    longest = TOKENS + max(len(prompt.tokens) for prompt in prompts)
    config = engine_config(BUNDLED_MODEL, None, settings=SETTINGS, verify_tp=1, longest=longest)
    engine = build_local_engine(config, cost=NOMINAL_COST)
    times: dict[RoundSetting, RoundTimes] = {}
    measure_rounds({1: engine}, prompts, SETTINGS, max_tokens=TOKENS, times=times)
    return times


def test_two_ranks_make_the_rounds_of_one_process_and_their_costs_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "costs", "--json", "--verify-tp", "2", "--repeats", "1"]
    words += ["--batches", *map(str, BATCHES), "--lengths", *map(str, LENGTHS)]
    words += ["--num-prompts", "2", "--max-tokens", str(TOKENS)]
    assert main(words) == 0
    file = tmp_path / "costs.json"
    file.write_text(capsys.readouterr().out)
    costs = read_costs(file)
    settings = [
        (round_cost.num_requests, round_cost.num_draft_tokens) for round_cost in costs.rounds
    ]
    assert settings == [(setting.num_requests, setting.num_draft_tokens) for setting in SETTINGS]
    for round_cost in costs.rounds:
        assert 0.0 < max(round_cost.draft_s, round_cost.verify_s) < round_cost.round_s

    # The same texts, so that every round accepts the same drafts.
    single_rounds = _rounds_of_one_process()
    assert [round_cost.tokens_per_round for round_cost in costs.rounds] == [
        round_cost.tokens_per_round for round_cost in round_costs(single_rounds)
    ]
    assert costs.survival == survival_of(single_rounds)
    assert costs.survival[0] >= costs.survival[1] > 0.0

    words = ["plan", "--model", str(BUNDLED_MODEL), "--on-cpu", "--json"]
    words += ["--exit-layer", str(costs.model.exit_layer), "--costs"]
    assert main([*words, str(file)]) == 2
    assert "eesd bench costs --verify-tp 1" in capsys.readouterr().err
    report = json.loads(file.read_text())
    report["costs"]["verify_tensor_parallel_size"] = 1
    file.write_text(json.dumps(report))
    assert main([*words, str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"][2]["round_s"] > 0.0
