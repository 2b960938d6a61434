"""Keys with limits at two ingresses of a running service, and what a greedy one does to others."""

import asyncio
import hashlib
import json
import logging
import os
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, pairwise
from pathlib import Path
from threading import Event

import httpx
import pytest
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from ray import serve

from serve_app.app import application_of
from serve_app.config import service_config
from serve_app.service.serve_instance import deploy
from tests.support.running import Running, until

logger = logging.getLogger(__name__)

NAME = "quotas"
MAX_RUNNING = 8
GREEDY_TOKENS = 400
"""Of each text of the greedy key: the eight that run end one after the other all the time."""
SLOTS = {
    "few": {"max_concurrent_requests": 3},
    "greedy": {},
    "modest": {},
    "urgent": {"priority": 0},
    "leaving": {"tokens_per_minute": 1000},
}


def _write(file: Path, **keys: dict[str, object]) -> None:
    entries = [
        {"name": name, "sha256": hashlib.sha256(f"of {name}".encode()).hexdigest(), **limits}
        for name, limits in keys.items()
    ]
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"keys": entries}))
    os.replace(new, file)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    _write(file, **SLOTS)
    return file


@pytest.fixture(scope="module")
def shared(ray_port: int, tiny_service: Path, keys_file: Path) -> Iterator[Running]:
    config = service_config(
        {
            "engine": {
                "model": {"path": str(tiny_service), "dtype": "float32", "device": "cpu"},
                "cache": {"num_pages": 512},
                "scheduler": {"max_running": MAX_RUNNING},
                "parallel": {"verify_tensor_parallel_size": 1},
            },
            "app_name": NAME,
            "model_name": "tiny",
            "num_ingresses": 2,
            "keys_file": str(keys_file),
            "router": {"name": f"{NAME}-router"},
            "recovery": {"stream_pause_s": 120.0},
        }
    )
    application = application_of(config, api_key=SecretStr("root"))
    deploy(application, name=NAME, route_prefix=f"/{NAME}", wait=Event().wait)
    yield Running(
        url=f"http://127.0.0.1:{ray_port}/{NAME}",
        config=config,
        pipelines=serve.get_deployment_handle("Pipeline", NAME),
    )
    serve.delete(NAME)
    ray.kill(ray.get_actor(f"{NAME}-router", namespace=config.router.namespace))


@asynccontextmanager
async def _client(service: Running) -> AsyncIterator[httpx.AsyncClient]:
    # A new connection for each request, so that both ingresses get some.
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=service.url, limits=limits, timeout=120) as client:
        yield client


class Stream:
    """One streamed completion of a key."""

    def __init__(self, client: httpx.AsyncClient, key: str, **fields: object) -> None:
        self.status = 0
        self.queue_s = 0.0
        """Time from the engine's queue to the first round."""
        self.begun = asyncio.Event()
        body = {"prompt": [5, 6, 7], "max_tokens": 40, "seed": 1, "stream": True, **fields}
        body["stream_options"] = {"include_usage": True}
        self._request = client.build_request(
            "POST",
            "/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer of {key}"},
        )
        self._client = client
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        answer = await self._client.send(self._request, stream=True)
        try:
            self.status = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    metrics = json.loads(line[6:]).get("metrics") or {}
                    self.queue_s = (metrics.get("queue_time_ms") or 0.0) / 1000.0
                    self.begun.set()
        finally:
            self.begun.set()
            await answer.aclose()


def _counts(service: Running, key: str) -> dict[tuple[str, str], float]:
    """Returns the number of answers to a key, by ingress and status."""
    page = httpx.get(f"{service.url}/metrics", timeout=30).text
    return {
        (sample.labels["ingress"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "eesd_key_requests_total" and sample.labels["key"] == key
    }


def test_a_limit_of_requests_holds_over_both_ingresses(shared: Running) -> None:
    async def run() -> list[int]:
        async with _client(shared) as client:
            long = [Stream(client, "few", max_tokens=3800, ignore_eos=True) for _ in range(3)]
            for stream in long:
                await stream.begun.wait()
            excess = [Stream(client, "few") for _ in range(30)]
            await asyncio.gather(*(stream.task for stream in excess))
            for stream in long:
                stream.task.cancel()
            assert [stream.status for stream in long] == [200] * 3
            return [stream.status for stream in excess]

    assert asyncio.run(run()) == [429] * 30
    counts = until(
        lambda: (
            (counts := _counts(shared, "few"))
            and len({ingress for ingress, status in counts if status == "429"}) == 2
            and sum(number for (_, status), number in counts.items() if status == "429") >= 30
            and counts
        ),
        timeout_s=30,
    )
    assert sum(number for (_, status), number in counts.items() if status == "429") == 30

    async def again() -> int:
        async with _client(shared) as client:
            stream = Stream(client, "few")
            await stream.task
            return stream.status

    until(lambda: asyncio.run(again()) == 200, timeout_s=30)


def _tokens_of(service: Running, key: str) -> Counter[str]:
    """Returns the tokens that a key has used, by kind, over all ingresses."""
    page = httpx.get(f"{service.url}/metrics", timeout=30).text
    used: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "eesd_key_tokens_total" and sample.labels["key"] == key:
                used[sample.labels["kind"]] += int(sample.value)
    return used


def _post(service: Running, key: str, **fields: object) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/completions",
        json={"max_tokens": 1, "seed": 1, **fields},
        headers={"Authorization": f"Bearer of {key}", "Connection": "close"},
        timeout=60,
    )


def test_a_key_finds_its_own_prompts_in_the_cache_and_no_other_keys(shared: Running) -> None:
    def num_cached(key: str, **fields: object) -> int:
        prompt = [1 + at % 50 for at in range(200)]
        answer = _post(shared, key, prompt=prompt, **fields)
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert num_cached("modest") == 0
    assert num_cached("modest") >= 160
    assert num_cached("urgent") == 0, "a guess of another key's prompt"
    assert num_cached("urgent") >= 160
    assert num_cached("modest", cache_salt="s") == 0
    assert num_cached("modest", cache_salt="t") == 0
    assert num_cached("modest", cache_salt="s", n=2) >= 160


def test_clients_that_leave_before_their_first_token_use_up_their_key(shared: Running) -> None:
    def leave() -> int:
        """Returns the status; 0 where the client has left without one."""
        try:
            answer = httpx.post(
                f"{shared.url}/v1/completions",
                json={"prompt": [7] * 3500, "max_tokens": 10, "speculation": {"mode": "off"}},
                headers={"Authorization": "Bearer of leaving", "Connection": "close"},
                timeout=httpx.Timeout(30, read=0.06),
            )
        except httpx.ReadTimeout:
            return 0
        return answer.status_code

    until(lambda: leave() == 429, timeout_s=10)
    # An ingress is told the metrics of another one after a while.
    used = until(
        lambda: (tokens := _tokens_of(shared, "leaving"))["prompt"] and tokens, timeout_s=10
    )
    assert used["generated"] == 0, "all have left before"
    assert 3500 <= used["prompt"] <= 5 * 3500
    assert _post(shared, "modest", prompt=[1]).status_code == 200


@pytest.mark.slow
def test_while_the_router_is_dead_requests_are_served_and_then_limits_hold_again(
    shared: Running,
) -> None:
    router = ray.get_actor(f"{NAME}-router", namespace=shared.config.router.namespace)
    pid = ray.get(router.process_info.remote()).pid

    async def run() -> None:
        async with _client(shared) as client:
            off = {"mode": "off"}  # a token a round: they outlast the restart
            long = [
                Stream(client, "few", max_tokens=3800, ignore_eos=True, speculation=off)
                for _ in range(3)
            ]
            for stream in long:
                await stream.begun.wait()
            os.kill(pid, 9)
            others = [Stream(client, "greedy") for _ in range(6)]
            await asyncio.gather(*(stream.task for stream in others))
            assert [stream.status for stream in others] == [200] * 6
            # It is restarted, and both ingresses tell it what they hold.
            num_refusals = 0
            while num_refusals < 8:
                probe = Stream(client, "few", max_tokens=1)
                await probe.task
                num_refusals = num_refusals + 1 if probe.status == 429 else 0
                assert not any(stream.task.done() for stream in long), "no limit held in time"
            process = await asyncio.to_thread(ray.get, router.process_info.remote(), timeout=30)
            assert process.pid != pid
            for stream in long:
                stream.task.cancel()

    asyncio.run(run())


def test_a_changed_file_of_keys_reaches_both_ingresses(shared: Running, keys_file: Path) -> None:
    def status(key: str) -> int:
        answer = httpx.get(
            f"{shared.url}/v1/models", headers={"Authorization": f"Bearer of {key}"}, timeout=30
        )
        return answer.status_code

    assert status("newcomer") == 401
    _write(keys_file, **SLOTS, newcomer={})
    until(lambda: all(status("newcomer") == 200 for _ in range(12)), timeout_s=30)
    _write(keys_file, **SLOTS)
    until(lambda: all(status("newcomer") == 401 for _ in range(12)), timeout_s=30)


def _ingresses() -> dict[str, str]:
    """Returns name and namespace of the HTTP replicas."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {
        actor["name"]: actor["namespace"] for actor in actors if f"{NAME}#Ingress#" in actor["name"]
    }


def test_an_ingress_that_starts_with_a_wrong_file_refuses_keys_until_it_is_mended(
    shared: Running, keys_file: Path
) -> None:
    def answers(key: str, path: str = "/v1/models") -> set[tuple[int, str | None]]:
        errors = set()
        for _ in range(12):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"{shared.url}{path}", headers=headers, timeout=30)
            error = answer.json().get("error", {}) if answer.content else {}
            errors.add((answer.status_code, error.get("code")))
        return errors

    before = _ingresses()
    assert len(before) == 2
    keys_file.write_text("keys: 3")
    victim = next(iter(before))
    ray.kill(ray.get_actor(victim, namespace=before[victim]))
    mixed = {(200, None), (503, "keys_unknown")}
    try:
        until(lambda: answers("of modest") == mixed, timeout_s=60)
        assert answers("root") == {(200, None)}
        assert answers("of modest", "/health") == {(200, None), (503, "not_ready")}
        page = httpx.get(
            f"{shared.url}/debug/pipelines", headers={"Authorization": "Bearer root"}, timeout=30
        )
        assert "keys: Input should be a valid tuple" in page.json()["refused_keys"]
    finally:
        _write(keys_file, **SLOTS)
    until(lambda: answers("of modest") == {(200, None)}, timeout_s=30)
    assert answers("of none") == {(401, "invalid_api_key")}


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


async def _queue_times(client: httpx.AsyncClient, key: str, *, number: int = 40) -> list[float]:
    """Returns the times in the queue of requests that one caller sends one after the other."""
    times_s = []
    for at in range(number):
        stream = Stream(client, key, prompt=[9, 8, 7, 1 + at], max_tokens=3)
        await stream.task
        assert stream.status == 200
        times_s.append(stream.queue_s)
    return times_s


async def _round_s(client: httpx.AsyncClient) -> float:
    """Returns the p95 of the times from one round to the next, of the latest ones."""
    answer = await client.get("/debug/rounds", headers={"Authorization": "Bearer root"})
    starts_s = [stats["started_unix_s"] for stats in answer.json()["rounds"][-100:]]
    return _p95([after - before for before, after in pairwise(starts_s)])


@asynccontextmanager
async def _load(client: httpx.AsyncClient, key: str, *, number: int) -> AsyncIterator[None]:
    """Keeps so many long requests of a key going."""
    running: set[asyncio.Task[None]] = set()

    async def one_after_the_other(first: int) -> None:
        for at in count(first, number):
            prompt = [1 + at % 300] * 20
            stream = Stream(client, key, max_tokens=GREEDY_TOKENS, prompt=prompt, ignore_eos=True)
            running.add(stream.task)
            await stream.task

    loads = [asyncio.ensure_future(one_after_the_other(at)) for at in range(number)]
    try:
        await asyncio.sleep(3.0)
        assert not any(load.done() for load in loads)
        yield
    finally:
        for task in (*loads, *running):
            task.cancel()
        await asyncio.gather(*loads, *running, return_exceptions=True)


@pytest.mark.alone  # measures the service, so it needs two quiet cores
def test_a_greedy_key_delays_another_by_few_rounds_and_itself_by_its_queue(
    shared: Running,
) -> None:
    async def run() -> tuple[list[float], list[float], list[float], float]:
        async with _client(shared) as client:
            undisturbed = await _queue_times(client, "modest")
            async with _load(client, "greedy", number=4 * MAX_RUNNING):
                against = await _queue_times(client, "modest")
                round_s = await _round_s(client)
                within = await _queue_times(client, "greedy", number=2)
            return undisturbed, against, within, round_s

    undisturbed, against, within, round_s = asyncio.run(run())
    logger.warning(
        "%s",
        f"p95 of the time in the queue: alone {_p95(undisturbed):.3f} s, against a greedy key "
        f"{_p95(against):.3f} s; least within the greedy key {min(within):.3f} s; "
        f"p95 of a round {round_s:.4f} s",
    )
    assert _p95(against) - _p95(undisturbed) <= 3 * round_s
    assert min(within) > _p95(against), "the queue was full"
