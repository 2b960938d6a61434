"""Sources of answers for the rows of a job: engines of a process, running services, pipelines.

A source is a description that travels to an actor, and is built there.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import ray

from eesd_dist.config import EngineConfig
from eesd_dist.engine.local import with_all_cores
from eesd_dist.telemetry.tracing_options import TracingOptions
from serve_app.batch.http_client import HttpClient
from serve_app.batch.local_client import LocalClient, answered_by, exported_traces
from serve_app.batch.local_engine import LocalModel
from serve_app.batch.loop import AnswerBody
from serve_app.batch.usage import Usage
from serve_app.openai.text_service import TextService


class Answering(Protocol):
    """Something that answers rows, in the process of an actor."""

    max_attempts: int
    """Attempts at a row under which it fails."""
    max_rows: int
    """Rows that it has at the same time: more would be refused, or wait for nothing."""
    patience_s: float
    """Longest time that a row waits for room."""

    async def open(self) -> AnswerBody: ...
    @property
    def is_broken(self) -> bool:
        """True if nothing is answered in this process any more."""
        ...

    def waiting_for(self) -> str:
        """Returns why it is not open yet, if that is known."""
        ...

    def close(self) -> Usage:
        """Sends what was traced; returns what its engine has used."""
        ...


def thread_settings() -> Mapping[str, str]:
    """Returns the setting for threads of this process's environment, if there is one."""
    return {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """Describes an engine of one process; built where the actor runs."""

    engine: EngineConfig
    model_name: str
    tracing: TracingOptions
    has_whole_node: bool
    """Uses all cores of its node; otherwise those that are reserved for it."""
    environment: Mapping[str, str] = field(default_factory=thread_settings)
    """The user's settings for threads: Ray replaces them in the actor's process."""

    def build(self) -> "EngineAnswering":
        return EngineAnswering(self)


class EngineAnswering:
    """An engine of this process, with as many threads as it has cores."""

    max_attempts = 1  # one that failed is broken
    patience_s = math.inf

    def __init__(self, source: EngineSource) -> None:
        if source.has_whole_node:
            self._config = with_all_cores(source.engine, environment=source.environment)
        else:
            self._config = _with_own_cores(source.engine)
        model = LocalModel.load(self._config, name=source.model_name)
        self._preparation = model.preparation
        self._tracing = exported_traces(source.tracing)
        self._engine = model.build(self._tracing)
        scheduler = self._config.scheduler
        self.max_rows = scheduler.max_running + scheduler.max_waiting // 2
        self._client: LocalClient | None = None

    async def open(self) -> AnswerBody:
        self._client = LocalClient(self._engine, tracing=self._tracing)
        return answered_by(TextService(self._client, self._preparation, tracing=self._tracing))

    @property
    def is_broken(self) -> bool:
        return self._client is not None and self._client.is_broken

    def waiting_for(self) -> str:
        return "it loads the model"

    def close(self) -> Usage:
        self._tracing.close()
        return Usage() if self._client is None else self._client.usage(self._config)


def _with_own_cores(engine: EngineConfig) -> EngineConfig:
    if "num_threads" in engine.parallel.model_fields_set:
        return engine
    cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
    parallel = engine.parallel.model_copy(update={"num_threads": max(1, int(cores))})
    return engine.model_copy(update={"parallel": parallel})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSource:
    """Describes a running service."""

    url: str
    api_key: str | None

    def build(self) -> "ServiceAnswering":
        return ServiceAnswering(self)


class ServiceAnswering:
    """A client of a running service."""

    is_broken = False
    max_attempts = 4
    max_rows = 1024
    patience_s = 600.0

    def __init__(self, source: ServiceSource) -> None:
        self._source = source

    async def open(self) -> AnswerBody:
        return HttpClient(self._source.url, api_key=self._source.api_key).answer

    def waiting_for(self) -> str:
        return ""

    def close(self) -> Usage:
        return Usage()


class Source(Protocol):
    """Description of what answers rows, which travels to the actors."""

    def build(self) -> Answering: ...
