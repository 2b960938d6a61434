import pickle
from dataclasses import replace
from typing import Any

import pytest

from eesd_dist.types import RoundStats
from serve_app.batch.usage import RoundSample, Usage

_ROUND = RoundStats(
    round_id=0,
    microbatch=0,
    num_requests=8,
    num_rows=8,
    num_prefill_rows=0,
    num_drafted=0,
    num_accepted=0,
    num_emitted=8,
    plan_s=0.0,
    draft_s=0.0,
    transfer_s=0.0,
    verify_s=1.0,
    commit_s=0.0,
    started_unix_s=0.0,
    elapsed_s=1.0,
)


def _round(**fields: Any) -> RoundStats:
    return replace(_ROUND, **fields)


def test_the_speed_up_is_over_plain_rounds_of_the_same_size() -> None:
    sample = RoundSample()
    drafted = _round(num_drafted=8, num_emitted=16, verify_s=1.25)
    sample.observe([_round()] * 2 + [drafted] * 100)
    expected = (2 * 8 + 100 * 16) / 8 / (2 + 100 * 1.25)
    assert sample.speed_up == pytest.approx(expected)
    # Rounds that read prompts, and sizes without plain rounds, say nothing.
    sample.observe([_round(num_prefill_rows=3, verify_s=9.0)])
    sample.observe([_round(num_requests=64, num_drafted=64, num_emitted=99)] * 9)
    assert sample.speed_up == pytest.approx(expected)


def test_one_plain_round_is_no_sample() -> None:
    sample = RoundSample()
    sample.observe([_round(), _round(num_drafted=8)])
    assert sample.speed_up is None


def test_usage_of_several_engines_is_added() -> None:
    total, other = Usage(core_s=3.0), Usage(core_s=4.0, gpu_s=1.0)
    total.rounds.observe([_round()])
    other.rounds.observe([_round(), _round(num_drafted=8, num_emitted=16)])
    total.add(pickle.loads(pickle.dumps(other)))
    assert (total.core_s, total.gpu_s) == (7.0, 1.0)
    assert total.rounds.speed_up == pytest.approx(4 / 3)
