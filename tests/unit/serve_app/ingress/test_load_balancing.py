"""What an ingress knows of the pipelines: at once from the router, or from the pipelines while the
router is silent."""

import asyncio
import subprocess
import sys
import time

import pytest

from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.ingress import load_balancing
from serve_app.ingress.load_balancing import LoadBalancer
from serve_app.ingress.retry import Attempts
from serve_app.router.actor import Router
from serve_app.router.calls import pipelines_of
from tests.support.in_process import Fault, ToyHandle
from tests.support.toy_stages import toy_token
from tests.unit.serve_app.ingress.toy_service import ToyService, config_of, toy_service

REQUEST = Request(
    request_id=RequestId("r"), prompt=(TokenId(1),), sampling=SamplingParams(max_tokens=40)
)
TEXT = [toy_token(REQUEST, 1 + i) for i in range(40)]


def _attempts() -> Attempts:
    return Attempts(REQUEST, suspect_after=2, clock=time.monotonic)


async def _choices(balancer: LoadBalancer) -> set[str]:
    """Returns the pipelines that requests go to."""
    chosen = [balancer.choose(_attempts()) for _ in range(20)]
    for choice in chosen:
        if choice is not None:
            balancer.ended(choice.pipeline, _attempts())
    return {"none" if choice is None else choice.pipeline for choice in chosen}


async def _listening(service: ToyService) -> LoadBalancer:
    service.load_balancer.start()
    await service.load_balancer.news(timeout_s=5.0)
    return service.load_balancer


def test_a_change_that_callers_should_know_does_not_wait_for_the_next_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_balancing, "_POLL_S", 30.0)

    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            leaders: list[dict[str, str]] = []
            service.load_balancer.on_answer = leaders.append
            balancer = await _listening(service)
            await asyncio.sleep(0.3)
            assert await _choices(balancer) == {"a", "b"}
            assert leaders[-1] == {"a": "leader of a", "b": "leader of b"}
            num_calls = service.router.calls.count("pipelines")
            await asyncio.sleep(0.3)
            assert service.router.calls.count("pipelines") == num_calls, "nothing has changed"
            service.pipelines["a"].is_ready = False
            began_s = time.monotonic()
            await balancer.news(timeout_s=5.0)
            assert time.monotonic() - began_s < 2.0
            assert await _choices(balancer) == {"b"}
            assert sum(bool(p["is_usable"]) for p in balancer._chooser.describe()) == 1

    asyncio.run(run())


def test_pipelines_are_asked_while_the_router_is_silent_and_no_more_once_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_balancing, "_POLL_S", 0.05)

    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            service.has_router = False
            balancer = await _listening(service)
            assert await _choices(balancer) == {"a", "b"}
            assert await service.tokens(REQUEST) == TEXT
            service.pipelines["b"].draining = True
            await asyncio.sleep(0.3)
            assert await _choices(balancer) == {"a"}
            service.has_router = True
            await asyncio.sleep(0.3)
            num_calls = service.replicas.num_asked
            assert num_calls > 2
            service.pipelines["a"].is_ready = False
            await asyncio.sleep(0.3)
            assert service.replicas.num_asked == num_calls
            assert await _choices(balancer) == {"b"}

    asyncio.run(run())


@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.UNREACHED])
def test_a_text_goes_on_in_another_pipeline_though_the_router_stops_answering(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with toy_service(config_of(), monkeypatch) as service:
            reading = asyncio.ensure_future(service.tokens(REQUEST))
            await service.has_submitted.wait()
            await asyncio.sleep(0.1)
            service.router.fault = lambda _: fault
            (used,) = [pipeline for pipeline in service.pipelines.values() if pipeline.served]
            await used.lose()
            assert await reading == TEXT
            assert all(pipeline.served for pipeline in service.pipelines.values())

    asyncio.run(run())


def test_a_restarted_router_that_knows_no_pipeline_yet_makes_none_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        config = config_of()
        async with toy_service(config, monkeypatch) as service:
            balancer = await _listening(service)
            await asyncio.sleep(0.2)
            service.router.actor = Router(config.router, config.engine.speculation)
            assert await _choices(balancer) == {"a", "b"}
            await asyncio.sleep(0.7)
            assert await _choices(balancer) == {"a", "b"}
            service.pipelines["b"].is_ready = False
            await asyncio.sleep(0.3)
            assert await _choices(balancer) == {"a"}

    asyncio.run(run())


def test_a_router_answers_at_once_unless_the_caller_knows_its_membership() -> None:
    async def run() -> None:
        config = config_of()
        async with asyncio.timeout(30.0):
            first = ToyHandle(Router(config.router, config.engine.speculation))
            membership_id, listed = await pipelines_of(
                first, app="app", membership_id="", wait_s=20.0
            )
            assert listed == ()
            began_s = time.monotonic()
            assert await pipelines_of(
                first, app="app", membership_id=membership_id, wait_s=0.2
            ) == (
                membership_id,
                (),
            )
            assert time.monotonic() - began_s >= 0.2
            second = ToyHandle(Router(config.router, config.engine.speculation))
            other, _ = await pipelines_of(
                second, app="app", membership_id=membership_id, wait_s=20.0
            )
            assert other != membership_id, "it is another router"

    asyncio.run(run())


_POLLING_AT_EXIT = """
import asyncio, atexit, threading, time
from eesd_dist.errors import EngineError
from serve_app.config import ServiceConfig
from serve_app.ingress import load_balancing
from serve_app.ingress.load_balancing import LoadBalancer

def no_router(_):
    raise EngineError("no router")

async def poll():
    balancer = LoadBalancer(ServiceConfig.model_validate(SETTINGS), pipelines=None)
    balancer._ask_pipelines = lambda: asyncio.sleep(0)
    balancer.start()
    await balancer._polling

load_balancing.find_router, load_balancing._POLL_S = no_router, 0.001
threading.Thread(target=asyncio.run, args=(poll(),), daemon=True).start()
atexit.register(time.sleep, 0.3)
time.sleep(0.3)
"""


def test_the_poll_ends_in_silence_when_its_process_exits() -> None:
    settings = config_of().model_dump(mode="json")
    program = f"SETTINGS = {settings!r}\n{_POLLING_AT_EXIT}"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "router silent" in ended.stderr, "it polls"
    assert "Traceback" not in ended.stderr
