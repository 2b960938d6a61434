"""The composition root: from a configuration to a Serve application.

Nothing is started here. `build_app` is what a Serve YAML names (`import_path:
serve_app.app:build_app`, the configuration under `args`), `application_of` what `eesd serve` runs.
Classes are wrapped here and not where they are defined: a decorated class would be pickled by
value, module and all.
"""

import secrets
from collections.abc import Mapping
from dataclasses import asdict

from pydantic import SecretStr
from ray import serve
from ray.serve import Application

from eesd_dist.workers.roles import StageFactory
from serve_app.config import ServiceConfig, service_config
from serve_app.ingress.deployment import Ingress
from serve_app.openai.event_ids import EVENT_KEY_BYTES
from serve_app.pipeline.deployment import Pipeline
from serve_app.pipeline.stage_factory import stages_of
from serve_app.pipeline.timings import timings_of

_MANY = 100_000
"""Serve's limit on live requests, out of reach: the engine's queue is the only bound."""

_RELEASE_S = 15.0


def build_app(args: Mapping[str, object] | ServiceConfig) -> Application:
    """Builds the application. Raises ConfigError for an invalid configuration.

    One parameter for both forms, since Serve passes a builder nothing else."""
    return application_of(args if isinstance(args, ServiceConfig) else service_config(dict(args)))


def application_of(
    config: ServiceConfig,
    *,
    stages: StageFactory | None = None,
    api_key: SecretStr | None = None,
) -> Application:
    """Builds the application. Without `stages` they are the configuration's (tests replace them);
    without `api_key` each HTTP replica reads the key from its environment.

    Raises ConfigError for times in the wrong order."""
    ingress = serve.deployment(
        serve.ingress(None)(Ingress),
        name="Ingress",
        num_replicas=config.num_ingresses,
        ray_actor_options={"num_cpus": 0, "resources": config.placement.front},
        max_ongoing_requests=_MANY,
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=config.recovery.drain_s,
        max_constructor_retry_count=1,
    ).bind(config, pipelines_of(config, stages=stages), _event_key(), api_key)
    return ingress


def pipelines_of(config: ServiceConfig, *, stages: StageFactory | None = None) -> Application:
    """Builds the pipelines alone, for clients in the cluster. Raises ConfigError for times in the
    wrong order."""
    timings_of(config)
    return serve.deployment(
        Pipeline,
        name="Pipeline",
        ray_actor_options={"num_cpus": 0, "resources": config.placement.front},
        max_ongoing_requests=_MANY,
        health_check_period_s=2.0,
        # Streams leave within `drain_s`; then the workers are ended.
        graceful_shutdown_timeout_s=config.recovery.drain_s + _RELEASE_S,
        max_constructor_retry_count=1,
        **_how_many(config),
    ).bind(config, stages_of(config) if stages is None else stages)


def _event_key() -> SecretStr:
    """Draws the key of the ids of events: Serve keeps it with the application and gives it to every
    replica, also to those that replace others."""
    return SecretStr(secrets.token_hex(EVENT_KEY_BYTES))


def _how_many(config: ServiceConfig) -> dict[str, object]:
    pipelines = config.pipelines
    if not pipelines.is_autoscaled:
        return {"num_replicas": pipelines.min_count}
    return {
        "autoscaling_config": {
            # The policy keeps the bounds, which `user_config` may change.
            "min_replicas": 0,
            "initial_replicas": pipelines.min_count,
            "max_replicas": _MANY,
            # The policy has delays of its own, and Serve's must not add to them.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "downscale_to_zero_delay_s": 0.0,
            "policy": {
                "policy_function": "serve_app.service.autoscaling:FleetPolicy",
                "policy_kwargs": {
                    "app": config.app_name,
                    "router": config.router.name,
                    "namespace": config.router.namespace,
                    "targets": asdict(pipelines.targets),
                },
            },
        }
    }
