"""From a configuration to a Serve application, which is not started."""

import pytest
from pydantic import SecretStr
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from eesd_dist.bundled_model import BUNDLED_MODEL
from serve_app.app import application_of, build_app
from serve_app.config import service_config
from serve_app.ingress.deployment import key_of

TREE = {"engine": {"model": {"path": str(BUNDLED_MODEL)}}}
CONFIG = service_config(TREE)


def test_serve_takes_the_builder_that_its_files_name() -> None:
    built = call_user_app_builder_with_args_if_necessary(build_app, TREE)
    assert isinstance(built, Application)


def test_a_key_reaches_the_http_replicas_and_shows_itself_nowhere() -> None:
    ingress = application_of(CONFIG, api_key=SecretStr("s3cret"))._bound_deployment
    assert ingress.init_args[-1].get_secret_value() == "s3cret"
    assert "s3cret" not in repr((ingress, ingress.init_args))
    assert "runtime_env" not in ingress.ray_actor_options  # Ray prints and logs that


def test_without_a_key_all_replicas_sign_with_one_that_is_drawn() -> None:
    drawn = [application_of(CONFIG)._bound_deployment.init_args[-2] for _ in range(2)]
    keys = {bytes.fromhex(key.get_secret_value()) for key in drawn}
    assert len(keys) == 2
    assert {len(key) for key in keys} == {32}
    assert all(key.get_secret_value() not in repr(drawn) for key in drawn)


def test_the_key_of_the_starting_process_overrides_the_environment_of_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CONFIG.api_key_env, raising=False)
    assert key_of(CONFIG, secret=None) is None
    assert key_of(CONFIG, secret=SecretStr("given")) == "given"
    monkeypatch.setenv(CONFIG.api_key_env, "of this node")
    assert key_of(CONFIG, secret=None) == "of this node"
    assert key_of(CONFIG, secret=SecretStr("given")) == "given"
    monkeypatch.setenv(CONFIG.api_key_env, "")
    assert key_of(CONFIG, secret=None) is None


def test_a_replica_that_leaves_has_time_to_end_its_workers_after_it_has_drained() -> None:
    config = service_config({**TREE, "recovery": {"drain_s": 40}})
    ingress = application_of(config)._bound_deployment
    (pipelines,) = [argument for argument in ingress.init_args if isinstance(argument, Application)]
    assert ingress._deployment_config.graceful_shutdown_timeout_s == 40
    timeout_s = pipelines._bound_deployment._deployment_config.graceful_shutdown_timeout_s
    assert 45 < timeout_s < 80
