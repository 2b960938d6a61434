"""Starts a batch over an engine in this process, or over a running service."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

from eesd_dist.engine.local import with_all_cores
from serve_app.batch.http_client import HttpClient
from serve_app.batch.job import BatchOptions, BatchReport, ServedModel, run_batch
from serve_app.batch.local_client import LocalClient, answered_by, exported_traces
from serve_app.batch.local_engine import LocalModel, with_room_for
from serve_app.batch.loop import RowLoop
from serve_app.batch.order import in_equal_waves
from serve_app.batch.plan import RayPlan
from serve_app.batch.signals import cancel_at_signals
from serve_app.config import ServiceConfig
from serve_app.openai.text_service import TextService
from serve_app.service.environment import prepare_for_cluster, prepare_for_local_ray


async def run_in_process(
    input_word: str,
    output_word: str,
    *,
    config: ServiceConfig,
    options: BatchOptions,
    concurrency: int,
) -> BatchReport:
    """Runs a batch in this process. Raises ConfigError before any row when something does not
    fit."""
    engine = with_room_for(concurrency, with_all_cores(config.engine))
    model = LocalModel.load(engine, name=config.served_model_name)

    @asynccontextmanager
    async def execution(options: BatchOptions, num_rows: int) -> AsyncIterator[RowLoop]:
        tracing = exported_traces(config.telemetry_options.tracing)
        async with aclosing(LocalClient(model.build(tracing), tracing=tracing)) as client:
            answer = answered_by(TextService(client, model.preparation, tracing=tracing))
            cancel_at_signals()
            yield RowLoop(
                answer,
                concurrency=in_equal_waves(concurrency, num_rows),
                body_of=options.bodies(model.served),
                usage_of=partial(client.usage, engine),
            )

    return await run_batch(
        input_word, output_word, execution=execution, model=model.served, options=options
    )


async def run_with_ray(
    input_word: str,
    output_word: str,
    *,
    config: ServiceConfig,
    options: BatchOptions,
    plan: RayPlan,
) -> BatchReport:
    """Runs a batch with engines in actors, on a Ray of its own or on a cluster. Raises ConfigError
    before any row when something does not fit."""
    # Ray reads the environment when it is imported.
    if plan.address is None:
        prepare_for_local_ray()
    else:
        prepare_for_cluster()
    from serve_app.batch.ray_job import job_execution

    engine = with_room_for(plan.concurrency, config.engine)
    config = config.model_copy(update={"engine": engine})
    model = LocalModel.load(engine, name=config.served_model_name)
    return await run_batch(
        input_word,
        output_word,
        execution=partial(job_execution, config=config, model=model, plan=plan),
        model=model.served,
        options=options,
    )


async def run_over_http(
    input_word: str,
    output_word: str,
    *,
    url: str,
    api_key: str | None,
    options: BatchOptions,
    concurrency: int,
) -> BatchReport:
    """Runs a batch over a service, which is asked for the model that it lists first where a row
    names none."""
    async with aclosing(HttpClient(url, api_key=api_key)) as client:
        name = await client.model_name()
        model = ServedModel(name=name, identity={"model_digest": f"served as {name}"})

        @asynccontextmanager
        async def execution(options: BatchOptions, num_rows: int) -> AsyncIterator[RowLoop]:
            bodies = options.bodies(model)
            cancel_at_signals()
            yield RowLoop(client.answer, concurrency=concurrency, body_of=bodies)

        options = replace(options, defaults={"model": name, **options.defaults})
        return await run_batch(
            input_word, output_word, execution=execution, model=model, options=options
        )
