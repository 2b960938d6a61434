"""The HTTP deployment of the service: a stateless FastAPI application on Serve.

HTTP and the OpenAI API are `serve_app.openai`; this adds a client for the pipelines, a tokenizer, a
health check and metrics.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import SecretStr
from ray import serve
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.exceptions import RequestCancelledError

from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.model.max_len import max_model_len_of
from eesd_dist.routing.fleet.departure import FleetState
from eesd_dist.telemetry.span_records import SpanRecord
from eesd_dist.text import Tokenizer
from eesd_dist.text.sampling_defaults import SamplingDefaults
from eesd_dist.text.tokenizer import leave_out_torch
from eesd_dist.workers.process import prepare_process, set_log_level, tracing_of
from serve_app.config import (
    LimitsConfig,
    ServiceConfig,
    StreamsConfig,
    live_config,
    require_autoscaled,
    require_key,
)
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.metrics_page import belief_page, fleet_as_json, fleet_page, joined, merged
from serve_app.ingress.operator_api import SharedState, operator_router
from serve_app.ingress.pipeline_client import ServiceClient
from serve_app.ingress.quotas import GlobalQuotas
from serve_app.ingress.shared import Shared
from serve_app.ingress.traces import Traces
from serve_app.openai.api import Degraded, build_api
from serve_app.openai.api_settings import ApiSettings, Limits, limits_of
from serve_app.openai.errors import NotDrained, UnknownPipeline
from serve_app.openai.keys import KeyRing, operators_key
from serve_app.openai.middleware.http_metrics import HttpMetrics
from serve_app.openai.pacing import Pace
from serve_app.openai.workloads import UNNAMED_CLASSES
from serve_app.pipeline.drain import Drained
from serve_app.pipeline.held_room import waiting_for_room
from serve_app.pipeline.reports import PipelineControl, PipelineState
from serve_app.router.actor import find_router, router_handle
from serve_app.router.calls import fleet_of, ingress_pages_of

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
_BELIEFS_TIMEOUT_S = 1.0
"""A scraper does not wait long."""
_HEALTH_S = 0.25
"""Age that the result of a health check may have. Metrics may be a second old."""
_REREAD_S = 1.0
"""Interval at which the file of keys is looked at."""
_KEYS_UNKNOWN = "the file of keys of this ingress is wrong or missing: its log says what is wrong"
_CHANGE_TIMEOUT_S = 3600.0
"""Pages are copied as long as that makes progress."""


class Ingress:
    """An HTTP replica; deployed by `serve_app.app`."""

    def __init__(
        self,
        config: ServiceConfig,
        pipelines: Any,
        event_key: SecretStr,
        api_key: SecretStr | None,
    ) -> None:
        """`event_key` signs the ids of events where there is no API key: in hexadecimal, the same
        for all replicas."""
        prepare_process(config.log_format)
        self._config = config
        self._api_key = api_key
        self._event_key = event_key
        self._tracing = tracing_of(config.telemetry_options, process=f"ingress-{os.getpid()}")
        self._name = serve.get_replica_context().replica_id.unique_id
        self._load_balancer = LoadBalancer(config, pipelines=pipelines, ingress=self._name)
        self._http_metrics = HttpMetrics(ingress=self._name)
        self._load_balancer.page_of_ingress = self._page
        self._client = ServiceClient(
            pipelines,
            config=config,
            tracing=self._tracing,
            load_balancer=self._load_balancer,
        )
        self._traces = Traces(
            self._tracing,
            ingresses=lambda: serve.get_deployment_handle(
                "Ingress", config.app_name, _check_exists=False
            ),
            pipelines=pipelines,
        )
        self._max_model_len = max_model_len_of(config.engine)
        self._limits = self._limits_of(config.limits)
        # Asked for without a key, and each costs calls to every process.
        self._shared_health = Shared(self._health, period_s=_HEALTH_S)
        self._shared_metrics = Shared(self._metrics)
        self._state = SharedState(self._shared_health, self.pipelines, self.controllers)
        self._changing: set[asyncio.Future[Any]] = set()
        """Pipelines that are being drained, or undrained."""
        self._refusal = ""
        """Reason why `user_config` was not applied; empty if it was."""
        self._keys: KeyRing | None = None
        self._rereading: asyncio.Task[None] | None = None

    def reconfigure(self, user_config: object) -> None:
        """Called by Serve with `user_config`. A wrong one is reported and changes nothing: an error
        here would end the replica."""
        try:
            live = live_config(user_config)
            require_autoscaled(self._config, live)
        except ConfigError as error:
            self._refusal = str(error)
            logger.error("ignored: %s", error)
            return
        self._refusal = ""
        set_log_level(live.log_level)
        self._limits.update(self._limits_of(live.limits or self._config.limits))
        self._load_balancer.targets = None if live.pipelines is None else live.pipelines.targets

    def _limits_of(self, config: LimitsConfig) -> Limits:
        return limits_of(
            config,
            max_model_len=self._max_model_len,
            max_running=self._config.engine.scheduler.max_running,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        config = self._config
        if config.pipelines.min_count == 0:
            router_handle(config)  # no pipeline may be there to start it
        self._load_balancer.start()
        leave_out_torch()
        api_key = key_of(config, secret=self._api_key)
        require_key(config, has_key=api_key is not None)
        if api_key is not None:
            # A wrong file would end this replica again and again, and the log would not say why.
            operators = operators_key(api_key)
            self._keys = KeyRing(operators, file=config.keys_file, must_be_right=False)
        if config.keys_file is not None:
            self._rereading = asyncio.ensure_future(self._reread_keys())
        quotas = GlobalQuotas(
            app=config.app_name, ingress=self._name, router=lambda: self._load_balancer.router
        )
        self._load_balancer.permits_held = quotas.held
        app = build_api(
            self._client,
            self._settings(api_key),
            tokenizer=Tokenizer.load(config.engine.model.path, max_tokens=self._max_model_len),
            limits=self._limits,
            health=self._shared_health,
            metrics=self._shared_metrics,
            kv_tokens=self._load_balancer.kv_tokens,
            tracing=self._tracing,
            http_metrics=self._http_metrics,
            keys=self._keys,
            quotas=quotas,
        )
        app.include_router(operator_router(self, has_key=api_key is not None))
        return app

    def _settings(self, api_key: str | None) -> ApiSettings:
        config = self._config
        event_key = bytes.fromhex(self._event_key.get_secret_value())
        return ApiSettings(
            model_name=config.served_model_name,
            max_model_len=self._max_model_len,
            max_draft_tokens=config.engine.speculation.max_draft_tokens,
            controller=config.engine.speculation.controller,
            workloads_by_temperature=config.router.workloads_by_temperature,
            event_key=event_key if api_key is None else api_key.encode(),
            cors_origins=config.cors_origins,
            created_unix_s=int(time.time()),
            resume_window_s=config.recovery.resume_window_s,
            share_prefix_cache=config.share_prefix_cache,
            sampling_defaults=SamplingDefaults.of_folder(
                config.engine.model.path, mode=config.engine.model.generation_config
            ),
            pace=_pace_of(config.streams),
            flush_interval_s=config.streams.flush_interval_s,
            names_answers=False,
            departures=(TaskCancelledError, RequestCancelledError),
        )

    async def _reread_keys(self) -> None:
        assert self._keys is not None, "a file of keys comes with the operators' key"
        while True:
            await asyncio.sleep(_REREAD_S)
            try:
                await asyncio.to_thread(self._keys.reread)
            except Exception:  # a bug: without this task no key could be withdrawn
                logger.exception("keys not read")

    async def spans(self) -> tuple[SpanRecord, ...]:
        """Returns the spans that this replica keeps."""
        return self._tracing.spans()

    async def flush(self) -> None:
        """Sends spans that are still waiting, before this replica is taken down."""
        await asyncio.to_thread(self._tracing.flush)

    async def _health(self) -> str | None:
        """Healthy if one pipeline is healthy; degraded if all healthy ones are degraded. Unhealthy
        where the keys are not known: those of other ingresses may be."""
        if self._keys is not None and not self._keys.is_complete:
            return _KEYS_UNKNOWN
        try:
            answers = await self._client.health(timeout_s=_ANSWER_TIMEOUT_S)
        except EngineError as error:
            if await self._is_idle():
                return None
            reasons = self._load_balancer.unavailable()
            return await self._with_waiting(_reasons_text(reasons) or str(error))
        healthy = [answer for answer in answers if answer.is_healthy]
        if healthy and all(answer.degraded for answer in healthy):
            return Degraded("; ".join(f"pipeline {a.pipeline}: {a.degraded}" for a in healthy))
        if healthy:
            return None
        reasons = {answer.pipeline: answer.reason for answer in answers}
        return await self._with_waiting(_reasons_text(self._load_balancer.unavailable() | reasons))

    async def _with_waiting(self, reason: str) -> str:
        """Adds which leases hold the room that a new pipeline waits for."""
        config = self._config
        with suppress(RayError):
            namespace = config.router.namespace
            if waiting := await waiting_for_room(config.app_name, namespace=namespace):
                return f"{reason}; {waiting}"
        return reason

    async def _is_idle(self) -> bool:
        """Returns whether there is no pipeline because none is wanted: the next request starts
        one."""
        fleet = await self._fleet()
        return fleet is not None and fleet.decision.target == 0

    async def _fleet(self) -> FleetState | None:
        """Returns the state of autoscaling; None where there is none, or the router is silent."""
        if not self._config.pipelines.is_autoscaled:
            return None
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                # Ray's head is asked for the name, and may be away.
                router = await asyncio.to_thread(find_router, self._config.router)
                return await fleet_of(router, app=self._config.app_name)
        except (TimeoutError, EngineError, RayError) as error:
            logger.info("fleet unknown: error=%r", error)
            return None

    async def _metrics(self) -> bytes:
        fleet, beliefs, ingresses = await asyncio.gather(
            self._fleet(), self._beliefs(), self._pages_of_ingresses()
        )
        try:
            pages = await self._client.metrics(timeout_s=_ANSWER_TIMEOUT_S)
        except EngineError:
            if fleet is None or fleet.num_ready:
                raise
            pages = ()  # no pipeline is ready

        def page() -> bytes:
            page = (
                merged(pages)
                + beliefs
                + joined((ingress_page, {}) for ingress_page in ingresses.values())
            )
            return page + (b"" if fleet is None else fleet_page(fleet))

        return await asyncio.to_thread(page)  # parsing takes tens of milliseconds

    async def _beliefs(self) -> bytes:
        """Returns the router's beliefs; nothing while it is silent."""
        try:
            async with asyncio.timeout(_BELIEFS_TIMEOUT_S):
                described = await self._described()
                names = UNNAMED_CLASSES.union(described["named"])
                return belief_page(described["workloads"], labels=names)
        except (TimeoutError, EngineError, RayError) as error:
            logger.info("beliefs unknown: error=%r", error)
            return b""

    async def _described(self) -> dict[str, Any]:
        # Ray's head is asked for the name, and may be away.
        router = await asyncio.to_thread(find_router, self._config.router)
        described: dict[str, Any] = await router.describe.remote()
        return described

    def _page(self) -> bytes:
        return self._load_balancer.page() + self._http_metrics.page()

    async def _pages_of_ingresses(self) -> dict[str, bytes]:
        """Returns the metrics of all ingresses, of the others as the router has heard them."""
        pages: dict[str, bytes] = {}
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                router = await asyncio.to_thread(find_router, self._config.router)
                pages = await ingress_pages_of(router, app=self._config.app_name)
        except (TimeoutError, EngineError, RayError) as error:
            logger.info("metrics of other ingresses unknown: error=%r", error)
        return {**pages, self._name: self._page()}

    async def state(self) -> dict[str, object]:
        return await self._state()

    async def drain(self, name: str) -> dict[str, object]:
        drained: Drained = await self._changed("drain", name)
        return asdict(drained)

    async def undrain(self, name: str) -> dict[str, object]:
        return {"pipeline": await self._changed("undrain", name)}

    async def _changed(self, change: str, name: str) -> Any:
        """Returns the pipeline's answer. It goes on when the client leaves."""
        calling = asyncio.ensure_future(
            self._client.change(change, name, timeout_s=_CHANGE_TIMEOUT_S)
        )
        self._changing.add(calling)
        calling.add_done_callback(self._changing.discard)
        try:
            answer = await asyncio.shield(calling)
        except ConfigError as error:
            raise NotDrained(str(error)) from error
        if answer is None:
            raise UnknownPipeline(name=name)
        return answer

    async def rounds(self) -> dict[str, object]:
        """Returns where the time of the latest rounds went."""
        rounds = await self._client.rounds(timeout_s=_ANSWER_TIMEOUT_S)
        return {"rounds": [asdict(stats) for stats in rounds]}

    async def pipelines(self) -> dict[str, object]:
        """Returns the processes of the pipelines, how often they were interrupted, what those wait
        for that start, and why there are as many."""
        states: tuple[PipelineState, ...] = ()
        with suppress(EngineError):  # none is running
            states = await self._client.states(timeout_s=_ANSWER_TIMEOUT_S)
        fleet = await self._fleet()
        started = {state.pipeline for state in states}
        starting = [
            {"pipeline": name, "reason": reason}
            for name, reason in self._load_balancer.unavailable().items()
            if name not in started
        ]
        return {
            "pipelines": [asdict(state) for state in states],
            "starting": starting,
            "fleet": None if fleet is None else fleet_as_json(fleet),
            "refused_settings": self._refusal,
            "refused_keys": "" if self._keys is None else self._keys.refused,
        }

    async def traces(self, limit: int) -> dict[str, object]:
        return {"traces": await self._traces.read(limit=limit)}

    async def trace(self, request_id: str) -> dict[str, object]:
        traces = await self._traces.read(limit=1, request_id=request_id)
        if not traces:
            raise HTTPException(404, f"no trace of request {request_id[:128]} is kept")
        return traces[0]

    async def controllers(self) -> dict[str, object]:
        """Returns beliefs about acceptance, by class, and the controllers that use them."""
        reports = await self._client.control(timeout_s=_ANSWER_TIMEOUT_S)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            router = await self._described()
        speculation = self._config.engine.speculation
        return {
            "default": {
                "controller": speculation.controller,
                "parameters": speculation.model_dump(mode="json", exclude={"controller"}),
            },
            "pinned": router["pinned"],
            "checkpoint": router["checkpoint"],
            "num_live": router["num_live"],
            "workloads": router["workloads"],
            "pipelines": [_as_json(report) for report in reports],
        }


def key_of(config: ServiceConfig, *, secret: SecretStr | None) -> str | None:
    """Returns the key that clients must send: the one of the deployed application, or else the one
    in this node's environment, which in a cluster may differ from that of `eesd serve`."""
    if secret is not None:
        return secret.get_secret_value()
    return os.environ.get(config.api_key_env) or None


def _pace_of(config: StreamsConfig) -> Pace | None:
    if config.interval_s is None:
        return None
    return Pace(interval_s=config.interval_s, tokens_per_event=config.tokens_per_event)


def _reasons_text(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"pipeline {name}: {reason}" for name, reason in reasons.items())


def _as_json(report: PipelineControl) -> dict[str, object]:
    control = report.control
    counts = zip_longest(control.drafted_by_position, control.accepted_by_position, fillvalue=0)
    return {
        "pipeline": report.pipeline,
        "num_live": report.num_live,
        "head": None if control.head is None else asdict(control.head),
        "calibration": control.calibration,
        "cost": control.cost,
        "acceptance_by_position": [
            {
                "position": position,
                "num_drafted": drafted,
                "num_accepted": accepted,
                "rate": accepted / drafted if drafted else None,
            }
            for position, (drafted, accepted) in enumerate(counts, start=1)
        ],
        "recorder": None if control.recorder is None else asdict(control.recorder),
    }
