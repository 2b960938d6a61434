"""Serve's policy of the pipelines: the router's last answer, without waiting for it."""

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

import serve_app.autoscaling
from eesd_dist.errors import EngineError
from eesd_dist.routing.fleet.size import FleetTargets
from serve_app.app import _how_many
from serve_app.config import service_config


@pytest.fixture
def config(tmp_path: Any) -> Any:
    return service_config(
        {
            "engine": {"model": {"path": str(tmp_path)}},
            "pipelines": {"min_count": 0, "max_count": 3, "up_delay_s": 7.0},
        }
    )


def _policy(config: Any) -> Any:
    found = AutoscalingConfig.model_validate(_how_many(config)["autoscaling_config"])
    policy = found.policy.get_policy()  # as the controller loads it: pickled
    assert isinstance(policy, type)
    return policy(**found.policy.policy_kwargs)


def test_serve_adds_no_delay_to_the_policys_own(config: Any) -> None:
    found = AutoscalingConfig.model_validate(_how_many(config)["autoscaling_config"])
    delays = (found.upscale_delay_s, found.downscale_delay_s, found.downscale_to_zero_delay_s)
    assert delays == (0.0, 0.0, 0.0)
    assert (found.min_replicas, found.max_replicas) == (0, 3)


def test_the_targets_of_the_configuration_reach_the_policy(config: Any) -> None:
    policy = _policy(config)
    assert policy._targets == config.pipelines.targets
    assert policy._targets == FleetTargets(min_count=0, max_count=3, up_delay_s=7.0)
    assert pickle.loads(pickle.dumps(policy._targets)) == policy._targets


def test_a_fixed_number_has_no_policy(tmp_path: Any) -> None:
    config = service_config(
        {
            "engine": {"model": {"path": str(tmp_path)}},
            "pipelines": {"min_count": 2, "max_count": 2},
        }
    )
    assert _how_many(config) == {"num_replicas": 2}


def test_the_number_stays_until_the_router_answers_and_when_it_falls_silent(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = _policy(config)
    # The pickled class has the globals of its own copy of the module.
    module = type(policy).__init__.__globals__
    asked: list[int] = []

    async def size_of_fleet(router: Any, *, app: str, targets: Any, count: int) -> int:
        asked.append(count)
        if len(asked) > 1:
            raise EngineError("silent")
        return 3

    monkeypatch.setitem(module, "find_router", lambda config: "the router")
    monkeypatch.setitem(module, "size_of_fleet", size_of_fleet)
    monkeypatch.setitem(module, "_PERIOD_S", 0.0)
    monkeypatch.setitem(module, "_SILENCE_S", 0.3)
    context = SimpleNamespace(target_num_replicas=1)

    async def run() -> list[int]:
        seen = [policy(context)[0]]
        await policy._asking
        seen.append(policy(context)[0])
        await asyncio.sleep(0.4)
        seen.append(policy(context)[0])
        return seen

    assert asyncio.run(run()) == [1, 3, 1]
    assert len(asked) > 1


def test_the_module_of_the_policy_is_named_in_the_configuration(config: Any) -> None:
    wanted: Any = _how_many(config)["autoscaling_config"]
    module, name = wanted["policy"]["policy_function"].split(":")
    assert module == serve_app.autoscaling.__name__
    assert name == serve_app.autoscaling.FleetPolicy.__name__
