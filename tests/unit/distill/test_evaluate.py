"""Evaluation of drafters of known quality: always, sometimes, never right."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.control.cost import CostModel
from eesd_dist.distill.answers import MAX_DRAFT_TOKENS, Answer, Query
from eesd_dist.distill.compare import Judged
from eesd_dist.distill.evaluate import EvaluateOptions, acceptance_of, evaluate, table
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.timing import Timing, speed_of
from eesd_dist.types import Outcome, RequestId
from tests.support.drafters import Agreement, save_target
from tests.support.judged_heads import machine_of, prompts_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("agreement", "rate"), [("always", 1.0), ("never", 0.0)])
def test_an_evaluation_says_what_was_built_into_the_head(
    target: Path, tmp_path: Path, agreement: Agreement, rate: float
) -> None:
    machine = machine_of(target, tmp_path, agreement)
    options = EvaluateOptions(
        temperatures=(0.0, 1.0), max_tokens=24, timed_prompts=2, timed_tokens=12
    )
    lines: list[str] = []
    evaluation = evaluate(
        machine, prompts_of(4), options, seed=0, executor=LocalExecutor(), say=lines.append
    )
    greedy, sampled = evaluation.temperatures
    assert greedy.acceptance.rate == greedy.likeness.agreement == rate
    assert set(greedy.by_class) == {"even", "odd"}
    assert evaluation.speed.num_texts == 4
    assert evaluation.speed.texts_unlike_plain == 0
    if rate:
        assert greedy.acceptance.by_position == (1.0,) * MAX_DRAFT_TOKENS
        assert greedy.acceptance.tokens_per_round > 5.0
        assert sampled.likeness.one_minus_tv == pytest.approx(1.0, abs=1e-3)
        assert sampled.acceptance.rate == pytest.approx(1.0, abs=0.02)
    else:
        assert greedy.acceptance.tokens_per_round == 1.0
        assert greedy.prediction.best_fixed_length == 0
        promised = (greedy.prediction.best_fixed, greedy.prediction.oracle)
        assert promised == pytest.approx((1.0, 1.0), rel=1e-12)  # sums of measured seconds
    written = json.loads((machine.head / "evaluation.json").read_text())
    assert written["exit_layer"] == 2
    assert written["temperatures"][0]["acceptance"]["rate"] == rate
    assert CostModel.from_json(written["cost_model"]) == evaluation.cost_model
    assert written["provenance"]["versions"]["torch"]
    assert lines == [table(evaluation)]


def _outcome(num_drafted: int, num_accepted: int) -> Outcome:
    return Outcome(request_id=RequestId("r"), num_drafted=num_drafted, num_accepted=num_accepted)


def test_acceptance_counts_judged_tokens_alone() -> None:
    query = Query(prompt=prompts_of(1)[0], temperature=0.0, seed=0)
    rounds = [_outcome(8, 3), _outcome(8, 0), _outcome(2, 2), _outcome(0, 0)]
    nothing = Judged(num_positions=0, agreed=0.0, overlap=0.0, is_greedy=True)
    acceptance = acceptance_of([Answer(query=query, tokens=(), outcomes=rounds, judged=nothing)])
    # 4 judged of the first, 1 of the second, 2 of the third; a round without a draft does not
    # count.
    assert (acceptance.num_rounds, acceptance.num_judged) == (3, 7)
    assert acceptance.rate == pytest.approx(5 / 7)
    assert acceptance.tokens_per_round == pytest.approx(1 + 5 / 3)
    assert acceptance.by_position[:4] == (2 / 3, 1.0, 1.0, 0.0)


def test_speed_is_a_ratio_of_sums_and_its_interval_holds_it() -> None:
    timing = Timing(
        temperature=0.0,
        plain_s=2.0,
        drafted_s=1.0,
        num_tokens=10,
        is_equal=True,
        outcomes=(_outcome(2, 2), _outcome(2, 0)),
    )
    slow = replace(timing, plain_s=1.0, drafted_s=1.0, is_equal=False)
    cost = CostModel(draft_step_s=0.5, verify_s=(1.0,) * 9)
    speed = speed_of([timing, slow], cost=cost, seed=0)
    assert speed.over_plain == pytest.approx(1.5)
    assert speed.low < 1.5 < speed.high
    assert (speed.plain_tokens_per_s, speed.tokens_per_s) == (pytest.approx(20 / 3), 10.0)
    assert (speed.num_texts, speed.texts_unlike_plain) == (2, 1)
    assert speed.tokens_per_round == 2.0
    # Two tokens per round of two seconds, compared with one per second.
    assert speed.predicted_over_plain == pytest.approx(1.0)
