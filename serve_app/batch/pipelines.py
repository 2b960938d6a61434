"""Pipelines as engines of a batch: each in its placement group, with as many ranks as it needs.

An actor of the job deploys a pipeline as a Serve application of its own, without HTTP, and is its
client: supervision and recovery are the service's. A detached actor removes the application when
the client is gone, however it ended.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass

import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError
from ray.serve.config import ProxyLocation

from cluster.ray_compat import actor_class, is_actor_dead, serve_status
from serve_app.app import pipelines_of
from serve_app.batch.local_client import answered_by, exported_traces
from serve_app.batch.local_engine import LocalModel
from serve_app.batch.loop import AnswerBody
from serve_app.batch.resources import uses_gpus
from serve_app.batch.usage import Usage
from serve_app.config import PipelinesConfig, ServiceConfig
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.pipeline_client import ServiceClient
from serve_app.openai.text_service import TextService
from serve_app.service.serve_instance import deploy, remove_router

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_ID_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSource:
    """Describes a pipeline of a job, with the engine and the placement of a service."""

    config: ServiceConfig

    def build(self) -> "PipelineAnswering":
        return PipelineAnswering(self)


class PipelineAnswering:
    """A pipeline, and this process as its client."""

    is_broken = False  # it is supervised
    max_attempts = 4
    patience_s = math.inf

    def __init__(self, source: PipelineSource) -> None:
        config = source.config
        self._owner = ray.get_runtime_context().get_actor_id() or ""
        name = f"eesd-batch-{self._owner[:_ID_DIGITS]}"
        self._config = config.model_copy(
            update={
                "app_name": name,
                "router": config.router.model_copy(update={"name": f"{name}-router"}),
                "pipelines": PipelinesConfig(),
                "num_ingresses": 1,
            }
        )
        self._started_s = time.monotonic()
        self._tracing = exported_traces(self._config.telemetry_options.tracing)
        model = LocalModel.load(config.engine, name=config.served_model_name)
        self._preparation = model.preparation
        scheduler = config.engine.scheduler
        self.max_rows = scheduler.max_running + scheduler.max_waiting // 2

    async def open(self) -> AnswerBody:
        await asyncio.to_thread(_start_serve)
        await asyncio.to_thread(self._deploy)
        self._started_s = time.monotonic()
        pipelines = serve.get_deployment_handle("Pipeline", self._config.app_name)
        client = ServiceClient(
            pipelines,
            config=self._config,
            tracing=self._tracing,
            load_balancer=LoadBalancer(self._config, pipelines=pipelines),
        )
        return answered_by(TextService(client, self._preparation, tracing=self._tracing))

    def waiting_for(self) -> str:
        return "its pipeline loads the model, or no node has room for its ranks"

    def close(self) -> Usage:
        self._tracing.close()
        seconds = time.monotonic() - self._started_s
        engine, num_processes = self._config.engine, self._config.num_processes
        if uses_gpus(engine.model.device):
            return Usage(gpu_s=num_processes * seconds)
        return Usage(core_s=num_processes * engine.parallel.num_threads * seconds)

    def _deploy(self) -> None:
        name = self._config.app_name
        cleanup = actor_class(PipelineCleanup).options(
            name=f"{name}-cleanup",
            namespace=self._config.router.namespace,
            lifetime="detached",
            get_if_exists=True,  # where this actor's process is another one than before
            max_restarts=-1,
            num_cpus=0,
        )
        cleanup.remote(self._config, self._owner)
        deploy(pipelines_of(self._config), name=name, route_prefix=None, wait=_patiently)


def _start_serve() -> None:
    """Starts Serve without HTTP; where it runs already it stays as it is."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="Disabled")
    except ActorAlreadyExistsError:  # another engine was faster
        serve.start(proxy_location="Disabled")


class PipelineCleanup:
    """Removes the pipeline of an actor that has ended, and a Serve without HTTP in which nothing
    else runs."""

    def __init__(self, config: ServiceConfig, owner: str) -> None:
        self._config = config
        self._owner = owner
        self._waiting = asyncio.ensure_future(self._wait())

    async def ping(self) -> None:
        """Makes the actor one with an event loop."""

    async def _wait(self) -> None:
        await asyncio.to_thread(self._remove_in_the_end)
        ray.actor.exit_actor()

    def _remove_in_the_end(self) -> None:
        while not (is_actor_dead(self._owner) and self._is_removed()):
            time.sleep(_POLL_S)

    def _is_removed(self) -> bool:
        """Removes the pipeline; returns whether nothing is left of it."""
        try:
            status = serve_status()
            if status is not None and self._config.app_name in status.route_prefixes:
                serve.delete(self._config.app_name)
                status = serve_status()
            remove_router(self._config.router)
            if (
                status is not None
                and status.proxy_location == ProxyLocation.Disabled
                and not status.route_prefixes
            ):
                serve.shutdown()
        except Exception as error:  # Serve may be ended by another pipeline: it is looked at again
            logger.warning("not removed yet: app=%s error=%r", self._config.app_name, error)
            return False
        return True


def _patiently(seconds: float) -> bool:
    time.sleep(seconds)
    return False
