"""Processes of the real service die; streams pause, and go on with the same tokens."""

import asyncio
import json
import os
import signal
import time
from threading import Event, Thread

import httpx
import pytest
import ray

from cluster.ray_compat import replica_actors
from eesd_dist.bench import load_client
from eesd_dist.bench.load_client import Listener, Streamed
from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from serve_app.pipeline.reports import PipelineState
from tests.support.event_stream import WITH_IDS, folded, parsed
from tests.support.running import Running, tokens_of, until


@pytest.mark.parametrize("victim", ["verify rank 1", "drafting actor"])
def test_a_stream_survives_the_death_of(victim: str, service: Running) -> None:
    prompt = Tokenizer.load(service.config.engine.model.path).encode("the lazy dog")
    sampling = SamplingParams(max_tokens=120, temperature=0.9, seed=4)
    undisturbed = tokens_of(
        service.items(Request(request_id=RequestId("one"), prompt=prompt, sampling=sampling))
    )
    before = service.state()

    items = service.items(Request(request_id=RequestId("two"), prompt=prompt, sampling=sampling))
    tokens = [token for emission in next(items) for token in emission.tokens]
    service.signal(victim, signal.SIGKILL)
    pauses = []
    last_s = time.monotonic()
    for item in items:
        tokens += tokens_of([item])
        pauses.append(time.monotonic() - last_s)
        last_s = time.monotonic()

    assert tokens == undisturbed
    after = service.ready_after(before)
    assert after.epoch == before.epoch + 1
    assert victim in after.last_trouble
    assert "its process has died" in after.last_trouble
    assert max(pauses, default=0.0) < service.config.recovery.pause_for(after.start_s)


def test_a_stream_survives_the_death_of_the_pipeline_replica(service: Running) -> None:
    def stream(*, kills: bool) -> str:
        body = {"model": "tiny", "prompt": "the log", "max_tokens": 120, "seed": 6, "stream": True}
        url = f"{service.url}/v1/completions"
        text = ""
        with httpx.stream("POST", url, json={**body, "ignore_eos": True}, timeout=180) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if kills:
                    os.kill(service.state().pid, signal.SIGKILL)
                    kills = False
        return text

    undisturbed = stream(kills=False)
    before = service.state()
    is_claimed, num_attempts, num_streams = Event(), service.num_attempts(), 0

    def streams() -> None:
        nonlocal num_streams
        while not is_claimed.is_set():
            request = Request(
                request_id=RequestId(f"meanwhile-{num_streams}"),
                prompt=(TokenId(1), TokenId(2)),
                sampling=SamplingParams(max_tokens=60),
            )
            tokens_of(service.items(request))
            num_streams += 1

    meanwhile = Thread(target=streams)
    meanwhile.start()
    assert stream(kills=True) == undisturbed

    def claimed() -> PipelineState | None:
        try:
            state = service.state()
        except ray.exceptions.RayError:  # it is on its way
            return None
        return state if state.pid != before.pid and state.is_ready else None

    try:
        after = until(claimed, timeout_s=120.0)
    finally:
        is_claimed.set()
        meanwhile.join()
    assert after is not None
    assert service.num_attempts() - num_attempts == num_streams, "no stream was interrupted"
    assert (after.pipeline, after.epoch) == (before.pipeline, before.epoch)
    assert after.leader == before.leader != "", "or ingresses would take it for another process"
    assert [w.pid for w in after.workers] == [w.pid for w in before.workers]
    assert httpx.get(f"{service.url}/health", timeout=60).status_code == 200


def test_a_stream_whose_connection_was_dropped_continues_after_its_last_event(
    service: Running,
) -> None:
    body = {
        "prompt": "the log",
        "max_tokens": 900,
        "temperature": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True, "flush_interval_s": 0},
        "return_token_ids": True,
        "ignore_eos": True,
        "request_id": "dropped",
    }
    url = f"{service.url}/v1/completions"
    prefix_text = b""
    with httpx.stream("POST", url, json=body, headers=WITH_IDS, timeout=180) as answer:
        for chunk in answer.iter_bytes():
            prefix_text += chunk
            if prefix_text.count(b"\n\n") > 150:
                break
    prefix = parsed(prefix_text.rpartition(b"\n\n")[0].decode())
    until(lambda: service.num_running() == 0)
    began_s = time.monotonic()
    headers = {"Last-Event-ID": prefix[-1].id}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=180) as answer:
        assert answer.status_code == 200
        suffix_text, resumed_s = b"", 0.0
        for chunk in answer.iter_bytes():
            suffix_text += chunk
            if b"data: " in suffix_text and not resumed_s:
                resumed_s = time.monotonic() - began_s
    suffix = parsed(suffix_text.decode())
    whole = folded(prefix + suffix)
    seed = suffix[-2].chunk["metrics"]["seed"]
    assert len(whole["choices"][0]["token_ids"]) == 900
    assert whole["usages"][0]["completion_tokens"] == 900
    print(f"next event after {resumed_s:.3f} s, {len(prefix)} events before it")  # noqa: T201

    plain = httpx.post(url, json={**body, "stream": False, "seed": seed}, timeout=180).json()
    assert whole["choices"][0]["text"] == plain["choices"][0]["text"]
    assert whole["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


def test_streams_of_a_killed_ingress_continue_at_the_other_one(service: Running) -> None:
    body = {
        "prompt": "the log",
        "max_tokens": 800,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }
    bodies = [{**body, "seed": i, "request_id": f"killed-{i}"} for i in range(4)]

    def victim() -> int:
        """Returns the process of the ingress with the most streams: Serve chooses at random."""
        ingresses = replica_actors(service.config.app_name, "Ingress")
        loads: list[tuple[int, int]] = ray.get(
            [
                ingress.__ray_call__.remote(lambda r: (r.get_num_ongoing_requests(), os.getpid()))
                for ingress in ingresses
            ],
            timeout=30,
        )
        num_streams, pid = max(loads)
        assert num_streams > 0, loads
        return pid

    async def read(*, kills: bool) -> list[Streamed]:
        listeners = [Listener(str(body["request_id"])) for body in bodies]
        async with httpx.AsyncClient(base_url=service.url, timeout=180) as client:
            reading = [
                asyncio.ensure_future(load_client.stream(client, listener, body, max_attempts=100))
                for listener, body in zip(listeners, bodies, strict=True)
            ]
            if kills:
                while not all(listener.heard().tokens for listener in listeners):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                os.kill(victim(), signal.SIGKILL)
            await asyncio.gather(*reading)
        return [listener.heard() for listener in listeners]

    undisturbed, disturbed = asyncio.run(read(kills=False)), asyncio.run(read(kills=True))
    for plain, other in zip(undisturbed, disturbed, strict=True):
        assert other.is_complete, other.error
        assert (plain.tokens, plain.text) == (other.tokens, other.text)
    resumed = [stream for stream in disturbed if stream.num_resumed]
    assert resumed, "no stream was in the ingress that was killed"
    pauses = [stream.longest_pause_s for stream in resumed]
    print(f"longest pauses of the resumed streams: {pauses}")  # noqa: T201
    assert max(pauses) < 5.0
