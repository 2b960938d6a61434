"""Ray for a batch job: a local one that ends with the job, or a cluster."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager

from cluster.ray_compat import rays_signal_handlers_unused
from serve_app.batch.engine_pool import EnginePool
from serve_app.batch.job import BatchOptions
from serve_app.batch.local_engine import LocalModel
from serve_app.batch.pipelines import PipelineSource
from serve_app.batch.plan import RayPlan
from serve_app.batch.resources import (
    default_resources,
    max_engines,
    max_pipelines,
    shared_resources,
)
from serve_app.batch.signals import cancel_at_signals
from serve_app.batch.sources import EngineSource, Source
from serve_app.config import PipelinesConfig, ServiceConfig
from serve_app.service.local_ray import connected_ray, local_ray, without_core_messages


@asynccontextmanager
async def job_execution(
    options: BatchOptions, num_rows: int, *, config: ServiceConfig, model: LocalModel, plan: RayPlan
) -> AsyncIterator[EnginePool]:
    """Gives the execution of a job; Ray runs, or is connected, until its end."""
    connection: AbstractContextManager[object] = (
        local_ray(_with_pipelines(config, plan.engines or 1), shows_logs=False)
        if plan.address is None
        else connected_ray(plan.address, shows_logs=False)
    )
    with without_core_messages(), rays_signal_handlers_unused(), connection:
        cancel_at_signals()  # Ray's core has set handlers of its own
        source, num_engines, resources = _engines(config, model, plan)
        yield EnginePool(
            source=source,
            body_of=options.bodies(model.served),
            num_engines=num_engines,
            resources=resources,
            concurrency=plan.concurrency,
            num_rows=num_rows,
        )


def _engines(
    config: ServiceConfig, model: LocalModel, plan: RayPlan
) -> tuple[Source, int, Mapping[str, float]]:
    """Returns the kind of a job's engines, their number, and what each actor reserves."""
    parallel, device = config.engine.parallel, config.engine.model.device
    if parallel.num_ranks > 2:
        num_pipelines = plan.engines or max_pipelines(config.num_processes, device)
        return PipelineSource(config=config), num_pipelines, {}
    resources = (
        shared_resources(plan.engines, device) if plan.engines else default_resources(device)
    )
    source = EngineSource(
        engine=config.engine,
        model_name=model.name,
        tracing=config.telemetry_options.tracing,
        has_whole_node=plan.engines is None and not resources.get("GPU"),
    )
    return source, plan.engines or max_engines(resources), resources


def _with_pipelines(config: ServiceConfig, number: int) -> ServiceConfig:
    return config.model_copy(update={"pipelines": PipelinesConfig(max_count=number)})
