"""Serve's policy of the pipelines: the router's last answer, without waiting for it."""

import asyncio
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

import serve_app.service.autoscaling
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.routing.fleet.size import FleetTargets
from serve_app.app import _how_many
from serve_app.config import PipelinesConfig, live_config, require_autoscaled, service_config
from serve_app.router.actor import Router


@pytest.fixture
def config(tmp_path: Any) -> Any:
    return service_config(
        {
            "engine": {"model": {"path": str(tmp_path)}},
            "pipelines": {"min_count": 0, "max_count": 3, "up_delay_s": 7.0},
        }
    )


def _policy(config: Any) -> Any:
    options = AutoscalingConfig.model_validate(_how_many(config)["autoscaling_config"])
    policy = options.policy.get_policy()  # as the controller loads it: pickled
    assert isinstance(policy, type)
    return policy(**options.policy.policy_kwargs)


def test_serve_adds_no_delay_to_the_policys_own(config: Any) -> None:
    options = AutoscalingConfig.model_validate(_how_many(config)["autoscaling_config"])
    delays = (options.upscale_delay_s, options.downscale_delay_s, options.downscale_to_zero_delay_s)
    assert delays == (0.0, 0.0, 0.0)
    assert (options.min_replicas, options.initial_replicas) == (0, 0)


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
    counts: list[int] = []

    async def size_of_fleet(router: Any, *, app: str, targets: Any, count: int) -> int:
        counts.append(count)
        if len(counts) > 1:
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
    assert len(counts) > 1


def test_the_module_of_the_policy_is_named_in_the_configuration(config: Any) -> None:
    options: Any = _how_many(config)["autoscaling_config"]
    module, name = options["policy"]["policy_function"].split(":")
    assert module == serve_app.service.autoscaling.__name__
    assert name == serve_app.service.autoscaling.FleetPolicy.__name__


def test_targets_of_a_user_config_replace_those_of_the_application(config: Any) -> None:
    configured = FleetTargets(min_count=1, max_count=2)
    live = FleetTargets(min_count=3, max_count=8)

    async def sizes() -> list[int]:
        router = Router(config.router, config.engine.speculation)
        seen = [await router.size_fleet("eesd", configured, 4)]  # no ingress has reported yet
        await router.pipelines("eesd", "", 0.0, "one", 0, live)
        seen.append(await router.size_fleet("eesd", configured, 4))
        seen.append(await router.size_fleet("eesd", configured, 2))
        await router.pipelines("eesd", "", 0.0, "one", 0, None)
        return [*seen, await router.size_fleet("eesd", configured, 4)]

    assert asyncio.run(sizes()) == [4, 4, 4, 3], "the number falls by one at a time"


def test_a_service_that_serve_does_not_ask_for_leaves_no_number_behind(config: Any) -> None:
    short = config.router.model_copy(update={"expiry_s": 0.2})
    targets = FleetTargets(min_count=4, max_count=8)

    async def sizes() -> list[int | None]:
        router = Router(short, config.engine.speculation)
        await router.pipelines("eesd", "", 0.0, "one", 0, None)
        seen: list[int | None] = [await router.size_fleet("eesd", targets, 1)]
        await asyncio.sleep(0.3)
        state = await router.fleet("eesd")
        seen.append(None if state is None else state.decision.target)
        await router.pipelines("eesd", "", 0.0, "one", 0, None)
        return [*seen, await router.size_fleet("eesd", replace(targets, min_count=1), 1)]

    assert asyncio.run(sizes()) == [4, None, 1]


def test_autoscaling_is_not_configured_where_the_number_is_fixed(config: Any) -> None:
    live = live_config({"pipelines": {"min_count": 1, "max_count": 2}})
    require_autoscaled(config, live)
    fixed = config.model_copy(update={"pipelines": PipelinesConfig()})
    require_autoscaled(fixed, live_config({}))
    with pytest.raises(ConfigError, match="fix the number at 1: change num_replicas"):
        require_autoscaled(fixed, live)
