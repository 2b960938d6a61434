"""`eesd serve`: starts the service and says when it is ready.

On a Ray of its own, the service ends with this process, completely. On a cluster it stays when this
process ends, and `eesd stop` removes it. What is served is `serve_app.app`.
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType

import ray
from pydantic import SecretStr
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from cluster.ray_compat import is_serve_running, rays_signal_handlers_unused
from eesd_dist.backends.cpu.ahead import is_compiling
from eesd_dist.errors import ConfigError, EesdError, EngineError
from eesd_dist.model.checkpoint_folder import require_checkpoint
from eesd_dist.workers.checking import ModelCheck
from eesd_dist.workers.compiling import start_compiling
from eesd_dist.workers.messages import PlacementMode
from serve_app.app import application_of
from serve_app.config import RouterConfig, ServiceConfig, require_key
from serve_app.openai.keys import KeyRing, operators_key
from serve_app.pipeline.assembly import placement_mode, require_local_room
from serve_app.pipeline.held_room import waiting_for_room
from serve_app.router.actor import find_router, router_handle
from serve_app.router.calls import pipelines_of
from serve_app.service.local_ray import connected_ray, local_ray, new_log_folder, service_ray
from serve_app.service.ray_failures import RayWatch, ray_errors_in_a_line
from serve_app.service.serve_instance import (
    deploy,
    remove_application,
    require_free,
    start_serve,
)
from serve_app.service.start_line import StartLine, shown_of
from serve_app.service.waiting import ChangedReason
from serve_app.service.warm_spares import with_default_spares

logger = logging.getLogger(__name__)

Say = Callable[[str], None]

_FLUSH_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 3.0
_DRAW_EVERY_S = 0.5
_MAX_MISSED_LOOKS = 20


class Stopping:
    """Set by the first Ctrl-C or SIGTERM; a second Ctrl-C then has its default effect.

    A handler of signals runs between any two steps of this thread, so it may take no lock that the
    thread can hold, which `threading.Event.set` does; `SimpleQueue.put` is made for it.
    """

    def __init__(self) -> None:
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Returns whether it is set, after `timeout_s` seconds at the latest."""
        if not self._is_set:
            with suppress(Empty):
                self._signals.get(timeout=timeout_s)
        return self._is_set

    def listen(self) -> None:
        """Installs the handlers; call it again after Ray has started: its core brings its own."""
        signal.signal(signal.SIGTERM, self._stop)
        if not self._is_set:
            signal.signal(signal.SIGINT, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._is_set = True
        self._signals.put(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_service(
    config: ServiceConfig,
    *,
    address: str | None,
    check: ModelCheck | None,
    shows_logs: bool,
    line: StartLine,
) -> None:
    """Serves until a signal; `shows_logs` prints the logs of the actors. `check`: of the model, if
    this machine computes it. `line` takes what there is to say, and ends when the service runs.

    Raises ConfigError when the service cannot be started with this configuration.
    """
    _check_early(config, is_ours=address is None)
    stopping = Stopping()
    stopping.listen()
    # Ray's handler would raise SystemExit within whatever Ray is doing.
    with ray_errors_in_a_line(), rays_signal_handlers_unused(), _hidden_key(config) as api_key:
        serve_ = (
            partial(_serve_locally, check=check)
            if address is None
            else partial(_serve_on_cluster, address=address)
        )
        serve_(config, stopping, api_key=api_key, shows_logs=shows_logs, line=line)
    if address is None:
        line.say("stopped: no process is left")


@contextmanager
def served(config: ServiceConfig, *, address: str | None) -> Iterator[None]:
    """Runs the whole service within the block, for benchmarks over HTTP."""
    config = config if address is not None else with_default_spares(config)
    where = (
        local_ray(config, shows_logs=False)
        if address is None
        else connected_ray(address, shows_logs=False)
    )
    with _hidden_key(config) as api_key, where:
        start_compiling(config.engine)
        start_serve(config, updates=False)
        try:
            _bring_up(config, Stopping(), api_key=api_key, line=StartLine(logger.warning))
            yield
        finally:
            _take_down(config, is_ours=address is None)


def stop_service(address: str, *, app_name: str, router: RouterConfig) -> None:
    """Removes the service from the cluster. Raises ConfigError if it is not there."""
    with connected_ray(address, shows_logs=False), ray_errors_in_a_line():
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        applications = sorted(serve.status().applications)
        if app_name not in applications:
            raise ConfigError(
                f"no application {app_name!r} in the cluster at {address}, which has "
                f"{', '.join(applications) or 'none'}: name it with --app"
            )
        _flush(app_name)
        remove_application(app_name, router)


def _serve_locally(
    config: ServiceConfig,
    stopping: Stopping,
    *,
    check: ModelCheck | None,
    api_key: SecretStr | None,
    shows_logs: bool,
    line: StartLine,
) -> None:
    """Serves on a Ray that is started here, and ends with it."""
    config = with_default_spares(config)
    began_s, say = time.monotonic(), line.say
    logs = new_log_folder(config.log_folder, port=config.port)
    say(f"starting {config.served_model_name} (logs: {logs}) ...")
    line.stage("starting Ray")
    with service_ray(config, shows_logs=shows_logs, logs=logs):
        stopping.listen()
        if check is not None:  # it ran while Ray started
            line.stage("checking the model")
            check.finish(stopped=stopping.wait)
        if stopping.is_set():
            return
        start_compiling(config.engine)  # while Serve starts
        line.stage("starting Serve")
        require_local_room(config)
        router_handle(config)  # starts while Serve does, instead of when a pipeline asks for it
        url = start_serve(config, updates=False)
        watch = _ray_watch(say, patience_s=config.recovery.drain_s)
        try:
            if not stopping.is_set():
                _bring_up(config, stopping, api_key=api_key, line=line)
            line.end()
            if not stopping.is_set():
                end = "Ctrl-C stops them"
                has_key = api_key is not None
                mode = placement_mode(config)
                say(
                    _welcome(
                        config, mode, where=url, url=url, has_key=has_key, began_s=began_s, end=end
                    )
                )
                _stay(config, stopping, watch=watch, say=say)
        finally:
            line.end()
            if watch.answers:
                say("stopping (live streams have a moment to end; Ctrl-C again to cut them off)")
                _take_down(config, is_ours=True)


def _serve_on_cluster(
    config: ServiceConfig,
    stopping: Stopping,
    *,
    address: str,
    api_key: SecretStr | None,
    shows_logs: bool,
    line: StartLine,
) -> None:
    """Deploys the service or updates it, and reports its interruptions. The service stays."""
    began_s, say = time.monotonic(), line.say
    say(f"starting {config.served_model_name} ...")
    line.stage("connecting to Ray")
    with connected_ray(address, shows_logs=shows_logs):
        stopping.listen()
        if stopping.is_set():
            return
        line.stage("starting Serve")
        is_update = config.app_name in serve.status().applications
        url = start_serve(config, updates=True)
        if is_update:
            say(f"updating {config.app_name}, which runs there: Serve replaces its replicas ...")
        try:
            _bring_up(config, stopping, api_key=api_key, line=line)
        except EesdError:
            if not is_update:
                remove_application(config.app_name, config.router)
            raise
        line.end()
        stop = _stop_command(config, address)
        if not stopping.is_set():
            where = f"{url} of the cluster's head"
            end, has_key = f"{stop} stops them", api_key is not None
            mode = placement_mode(config)
            say(
                _welcome(
                    config, mode, where=where, url=url, has_key=has_key, began_s=began_s, end=end
                )
            )
            _stay(config, stopping, watch=_ray_watch(say), say=say)
        if stopping.is_set():
            say(f"the service stays: {stop} stops it")


def _check_early(config: ServiceConfig, *, is_ours: bool) -> None:
    """Reports the most likely mistakes before Ray is started."""
    api_key = _api_key(config)
    require_key(config, has_key=api_key is not None)
    if api_key is not None:
        KeyRing(operators_key(api_key.get_secret_value()), file=config.keys_file)
    require_checkpoint(config.engine.model.path)
    if is_ours:  # a cluster's head may be another host, or its Serve may already listen there
        require_free(config)


def _bring_up(
    config: ServiceConfig, stopping: Stopping, *, api_key: SecretStr | None, line: StartLine
) -> None:
    application = application_of(config, api_key=api_key)
    deploy(
        application,
        name=config.app_name,
        route_prefix="/",
        wait=stopping.wait,
        while_deploying=WaitingLine(config, line),
    )


class WaitingLine:
    """Shows what a service that is being deployed waits for, and says it whenever it has changed;
    not both, of ranks that start."""

    def __init__(self, config: ServiceConfig, line: StartLine) -> None:
        self._config = config
        self._line = line
        self._every_s = _DRAW_EVERY_S if line.is_drawn else _LOOK_EVERY_S
        self._next_s = time.monotonic() + self._every_s
        self._tell = ChangedReason(line.say)

    def __call__(self) -> None:
        if time.monotonic() < self._next_s:
            return
        with suppress(RayError, EesdError):
            asyncio.run(self._look())
        self._next_s = time.monotonic() + self._every_s

    async def _look(self) -> None:
        config = self._config
        app, router = config.app_name, find_router(config.router)
        _, listed = await pipelines_of(router, app=app, membership_id="", wait_s=0.0)
        reports = [pipeline.report for pipeline in listed]
        leases = await waiting_for_room(app, namespace=config.router.namespace)
        self._line.show(shown_of(reports, compiles=is_compiling()))
        reasons = [
            f"pipeline {report.pipeline_id}: {report.unavailable}"
            for report in reports
            if not report.is_ready and not (self._line.is_drawn and report.start is not None)
        ]
        self._tell("; ".join([*reasons, *([leases] if leases else [])]))


@contextmanager
def _hidden_key(config: ServiceConfig) -> Iterator[SecretStr | None]:
    """Yields the key, and takes it out of the environment for so long: every process of Ray that is
    started inherits that."""
    api_key = _api_key(config)
    before = os.environ.pop(config.api_key_env, None)
    try:
        yield api_key
    finally:
        if before is not None:
            os.environ[config.api_key_env] = before


def _api_key(config: ServiceConfig) -> SecretStr | None:
    """Returns the key as an argument that is never printed: Ray prints and logs a runtime
    environment, and passes it on a command line."""
    key = os.environ.get(config.api_key_env)
    return SecretStr(key) if key else None


def _ray_watch(say: Say, *, patience_s: float = math.inf) -> RayWatch:
    return RayWatch(ray.get_runtime_context().gcs_address, say=say, patience_s=patience_s)


def _stay(config: ServiceConfig, stopping: Stopping, *, watch: RayWatch, say: Say) -> None:
    """Reports interruptions until a signal, or until the service is removed from Serve.

    Raises EngineError if the service or its Ray ends by itself.
    """
    pipelines = serve.get_deployment_handle("Pipeline", config.app_name)
    seen: dict[str, int] = {}
    mending: set[str] = set()
    missed = 0
    while not stopping.wait(_LOOK_EVERY_S):
        if not watch.look():
            continue
        status = _status_of(config.app_name)
        if status == ApplicationStatus.DELETING:
            say(f"{config.app_name} was removed, or Serve was shut down, by another process")
            return
        try:
            states = pipelines.broadcast("state").results(timeout_s=_LOOK_EVERY_S)
        except Exception as error:  # Ray raises anything while it shuts down
            logger.info("no answer from the pipelines: error=%r", error)
            if status not in (None, ApplicationStatus.DEPLOY_FAILED):
                continue  # Serve replaces lost replicas, which takes long for a large model
            missed += 1
            if missed == _MAX_MISSED_LOOKS:
                raise EngineError(
                    f"no pipeline has answered {missed} times, and Serve does not replace them: "
                    "the service has ended by itself"
                ) from error
            continue
        missed = 0
        for state in states:
            if state.num_interruptions > seen.get(state.pipeline, 0):
                seen[state.pipeline] = state.num_interruptions
                mending.add(state.pipeline)
                say(state.last_trouble)
            if state.is_ready and state.pipeline in mending:
                mending.remove(state.pipeline)
                say(f"pipeline {state.pipeline} is ready again")


def _status_of(app_name: str) -> ApplicationStatus | None:
    """Returns DELETING also for an application that is gone; None if Serve does not answer."""
    try:
        application = serve.status().applications.get(app_name) if is_serve_running() else None
    except Exception as error:  # Serve's controller is being replaced, or Ray is gone
        logger.info("no answer from Serve: error=%r", error)
        return None
    return ApplicationStatus.DELETING if application is None else application.status


def _take_down(config: ServiceConfig, *, is_ours: bool) -> None:
    if not ray.is_initialized():
        return
    if config.telemetry_options.tracing.exports or config.recorder.folder is not None:
        _flush(config.app_name)
    if is_ours:
        # Serve's shutdown would end the HTTP proxy first, and with it every live stream.
        try:
            serve.delete(config.app_name)
        except Exception as error:  # Serve is gone already; the processes end in any case
            logger.info("not deleted: app=%s error=%r", config.app_name, error)
        serve.shutdown()
    else:
        remove_application(config.app_name, config.router)


def _flush(app_name: str) -> None:
    """Spans are sent every half second, and the recorder writes later still: both are flushed
    before their processes end."""
    for deployment in ("Ingress", "Pipeline"):
        try:
            handle = serve.get_deployment_handle(deployment, app_name)
            handle.broadcast("flush").results(timeout_s=_FLUSH_TIMEOUT_S)
        except Exception as error:  # the service stops in any case
            logger.warning("not flushed: deployment=%s error=%r", deployment, error)


def _several(count: int, stage: str) -> list[str]:
    return [f"{count} {stage} rank{'s' if count > 1 else ''}"] if count else []


def _stop_command(config: ServiceConfig, address: str) -> str:
    default = RouterConfig()
    options = [
        ("--app", config.app_name, ServiceConfig.model_fields["app_name"].default),
        ("--router", config.router.name, default.name),
        ("--namespace", config.router.namespace, default.namespace),
    ]
    words = [f" {flag} {name}" for flag, name, usual in options if name != usual]
    return f"`eesd stop --address {address}{''.join(words)}`"


def _welcome(
    config: ServiceConfig,
    mode: PlacementMode,
    *,
    where: str,
    url: str,
    has_key: bool,
    began_s: float,
    end: str,
) -> str:
    """`end`: what ends the service."""
    took_s = time.monotonic() - began_s
    key = f' -H "Authorization: Bearer ${config.api_key_env}"' if has_key else ""
    parallel, is_shared = config.engine.parallel, mode == "shared"
    leader = "a drafting actor with verify rank 0" if is_shared else "a drafting actor"
    drafting = [leader, *_several(parallel.draft_tensor_parallel_size - 1, "draft")]
    num_verify = parallel.verify_tensor_parallel_size - is_shared
    names = " and ".join([*drafting, *_several(num_verify, "verify")])
    return f"""\
ready after {took_s:.0f} s: {config.served_model_name} on {where}
({names}; {end})

Try it:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{{
    "model": "{config.served_model_name}", "max_tokens": 64,
    "messages": [{{"role": "user", "content": "How many minutes are in three hours?"}}]}}'
"""
