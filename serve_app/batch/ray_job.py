"""Ray for a batch job: a local one that ends with the job, or a cluster."""

import math
import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

from cluster.ray_compat import rays_signal_handlers_unused
from serve_app.batch.job import BatchOptions
from serve_app.batch.local_engine import LocalModel
from serve_app.batch.plan import RayPlan
from serve_app.batch.processor import (
    ProcessorConfig,
    default_resources,
    max_engines,
    shared_resources,
)
from serve_app.batch.ray_execution import RayExecution
from serve_app.batch.signals import cancel_at_signals
from serve_app.batch.stage import EngineSource
from serve_app.config import ServiceConfig
from serve_app.service.local_ray import connected_ray, local_ray, without_core_messages

_MAX_BATCH_SIZE = 8
"""Rows of a batch: results come, and rows are lost with a process, in such portions."""


@asynccontextmanager
async def job_execution(
    options: BatchOptions, num_rows: int, *, config: ServiceConfig, model: LocalModel, plan: RayPlan
) -> AsyncIterator[RayExecution]:
    """Gives the execution of a job; Ray runs, or is connected, until its end."""
    # One core more than there are: engines reserve all of them, and Ray Data's tasks need one.
    num_cores = os.cpu_count() or 1
    connection: AbstractContextManager[object] = (
        local_ray(config, shows_logs=False, min_cpus=num_cores + 1)
        if plan.address is None
        else connected_ray(plan.address, shows_logs=False)
    )
    with without_core_messages(), rays_signal_handlers_unused(), connection:
        cancel_at_signals()  # Ray's core has set handlers of its own
        resources = shared_resources(plan.engines) if plan.engines else default_resources()
        batch_size = min(_MAX_BATCH_SIZE, plan.concurrency)
        has_whole_node = plan.engines is None and not resources.get("GPU")
        yield RayExecution(
            source=EngineSource(
                engine=config.engine, model_name=model.name, has_whole_node=has_whole_node
            ),
            config=ProcessorConfig(
                batch_size=batch_size,
                concurrency=plan.engines or (1, max_engines(resources)),
                max_concurrent_batches=math.ceil(plan.concurrency / batch_size),
                should_continue_on_error=True,
            ),
            body_of=options.bodies(model.served),
            resources=resources,
            num_rows=num_rows,
        )
