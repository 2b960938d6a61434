"""What a pipeline of the simulation reports, compared with `eesd_dist.workers.watch`."""

import pytest
import simpy

from cluster.fleet.arrivals import Arrival
from cluster.fleet.pipeline import Job, SimulatedPipeline
from cluster.fleet.setting import Speed

SPEED = Speed(fixed_s=0.1, request_s=0.0, tokens_per_turn=1.0, prompt_share=0.1)
FIRST_S = 1.1
"""100 tokens of prompt, and a token, at ten a second."""


def _pipeline(env: simpy.Environment, name: str) -> SimulatedPipeline:
    pipeline = SimulatedPipeline(name=name, env=env, speed=SPEED, ended=lambda job: None)
    env.process(pipeline.run())
    return pipeline


def _job(*, at_s: float = 0.0) -> Job:
    return Job(arrival=Arrival(at_s=at_s, num_prompt_tokens=100, num_tokens=1000))


def test_a_first_token_is_reported_when_it_leaves_by_its_own_pipeline() -> None:
    env = simpy.Environment()
    first, other = _pipeline(env, "one"), _pipeline(env, "other")
    first.add(_job())
    env.run(until=1.0)
    assert first.activity().first_token_s is None
    env.run(until=2.0)
    assert first.activity().first_token_s == pytest.approx(FIRST_S, abs=1e-4)
    assert other.activity().first_token_s is None
    env.run(until=40.0)  # the job still runs, and its first token is past the window
    assert first.activity().first_token_s is None


def test_first_tokens_count_from_the_arrival_at_the_pipeline() -> None:
    env = simpy.Environment()
    env.run(until=100.0)
    pipeline = _pipeline(env, "one")
    pipeline.add(_job())  # it has waited for a pipeline for 100 s
    env.run(until=105.0)
    assert pipeline.activity().first_token_s == pytest.approx(FIRST_S, abs=1e-4)


def test_a_job_that_has_tokens_already_has_no_first_token_in_its_next_pipeline() -> None:
    env = simpy.Environment()
    first, other = _pipeline(env, "one"), _pipeline(env, "other")
    first.add(_job())
    env.run(until=2.0)
    (moved,) = first.take_all()
    other.add(moved)
    env.run(until=10.0)
    assert other.activity().tokens_per_s > 0.0
    assert other.activity().first_token_s is None


def test_tokens_are_counted_between_the_ends_of_jobs_too() -> None:
    env = simpy.Environment()
    pipeline = _pipeline(env, "one")
    pipeline.add(_job())
    for second in range(1, 31):
        env.run(until=float(second))
        activity = pipeline.activity()
    assert activity.tokens_per_s == pytest.approx(10.0)
