"""One pipeline over three hosts gives the tokens of a single process, also after host failures."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from eesd_dist.config import EngineConfig, ModelConfig
from eesd_dist.engine.local import LocalEngine
from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams
from tests.hosts.conftest import DEADLINE_S
from tests.support.http_streams import HttpStream
from tests.support.ray_hosts import HostsService, RayHosts
from tests.support.running import until

PROMPTS = ("the lazy dog", "a quick brown fox", "the log", "over")
GREEDY, SAMPLED = 0.0, 1.0
_SHORT = 48
_PROMPT = PROMPTS[0]
_LONG = 300
_EARLY = 20
"""Tokens of a long stream that arrive before a failure is injected."""
_SLACK_S = 30.0
"""Allowed detection time beyond the deadline on a busy machine."""


def _body(prompt: str, *, temperature: float, max_tokens: int, mode: str) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "seed": 6,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "speculation": {"mode": mode},
    }


def _streams(service: HostsService, *, mode: str, max_tokens: int = _SHORT) -> list[list[int]]:
    """Streams all prompts at both temperatures at the same time."""
    streams = [
        HttpStream(service.url, _body(p, temperature=t, max_tokens=max_tokens, mode=mode))
        for p in PROMPTS
        for t in (GREEDY, SAMPLED)
    ]
    return [stream.result() for stream in streams]


@pytest.fixture(scope="module")
def single_process(tiny_model: Path) -> "_OneProcess":
    return _OneProcess(tiny_model)


class _OneProcess:
    """The texts of the same model in one process, without a network."""

    def __init__(self, model: Path) -> None:
        config = ModelConfig(path=model, dtype="float32", device="cpu")
        self._llm = LocalEngine(EngineConfig(model=config))
        self._tokenizer = Tokenizer.load(model)

    def tokens(
        self, prompts: Sequence[str], temperatures: Sequence[float], *, max_tokens: int
    ) -> list[list[int]]:
        requests = [
            Request(
                request_id=RequestId(f"{prompt} {temperature}"),
                prompt=self._tokenizer.encode(prompt),
                sampling=SamplingParams(temperature=temperature, seed=6, max_tokens=max_tokens),
            )
            for prompt in prompts
            for temperature in temperatures
        ]
        return [list(generation.tokens) for generation in self._llm.generate(requests)]


class _Watch:
    """Polls `/health`, and the log of the pipeline."""

    def __init__(self, service: HostsService) -> None:
        self.reasons: list[str] = []
        """The reasons of all 503 responses."""
        self._url = service.url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _look(self) -> None:
        while not self._stopping.wait(0.2):
            answer = httpx.get(f"{self._url}/health", timeout=60)
            if answer.status_code == 503:
                self.reasons.append(answer.text)


@pytest.fixture
def ready(service: HostsService, cluster: RayHosts) -> Iterator[dict[str, Any]]:
    """Yields the state of the pipeline before the test; repairs the hosts after it."""
    yield until(lambda: state if (state := service.pipeline())["is_ready"] else None, timeout_s=60)
    cluster.repair()


@pytest.fixture(scope="module")
def undisturbed(single_process: _OneProcess) -> list[int]:
    """The tokens that `_long_stream` must return."""
    return single_process.tokens([_PROMPT], [SAMPLED], max_tokens=_LONG)[0]


def _long_stream(service: HostsService) -> HttpStream:
    body = _body(_PROMPT, temperature=SAMPLED, max_tokens=_LONG, mode="auto")
    stream = HttpStream(service.url, body)
    stream.wait_for(_EARLY)
    return stream


def _workers(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in state["workers"]}


def test_verify_ranks_on_two_hosts_and_the_drafting_actor_on_a_third_say_what_one_process_says(
    service: HostsService, single_process: _OneProcess, ready: dict[str, Any]
) -> None:
    assert len({worker["host"] for worker in _workers(ready).values()}) == 3
    on = _streams(service, mode="auto")
    assert on == _streams(service, mode="off")
    # A sum over two ranks is rounded differently than in one process. The logits of this model are
    # so far apart that no choice changes.
    assert on == single_process.tokens(PROMPTS, (GREEDY, SAMPLED), max_tokens=_SHORT)


@pytest.mark.slow
def test_a_stream_goes_on_when_the_host_of_a_verify_rank_is_cut_off(
    service: HostsService, cluster: RayHosts, undisturbed: list[int], ready: dict[str, Any]
) -> None:
    victim = service.host_of("verify rank 1")
    fenced = _workers(ready)["verify rank 1"]
    with _Watch(service) as watch:
        stream = _long_stream(service)
        cluster.cut(victim)
        assert stream.result() == undisturbed
        until(lambda: any(fenced["host"] in reason for reason in watch.reasons))

    after = until(lambda: _reformed_since(ready, service), timeout_s=60)
    assert service.host_of("verify rank 1") != victim
    # The old rank is still alive and in its old epoch: when the link is back, its messages are
    # ignored.
    assert fenced["pid"] in cluster.hosts.pids(victim)
    cluster.hosts.mend(victim)
    assert _long_stream(service).result() == undisturbed
    assert service.pipeline()["epoch"] == after["epoch"]


@pytest.mark.slow
def test_a_stream_goes_on_when_a_link_is_mended_before_the_host_is_given_up(
    service: HostsService, cluster: RayHosts, undisturbed: list[int], ready: dict[str, Any]
) -> None:
    stream = _long_stream(service)
    victim = service.host_of("verify rank 0")
    cluster.cut(victim)
    time.sleep(1.0)
    cluster.hosts.mend(victim)
    assert stream.result() == undisturbed


@pytest.mark.parametrize("death", [RayHosts.power_off, RayHosts.kill_raylet])
def test_a_stream_goes_on_when_a_whole_host_dies(
    death: Callable[[RayHosts, int], None],
    service: HostsService,
    cluster: RayHosts,
    undisturbed: list[int],
    ready: dict[str, Any],
) -> None:
    victim = service.host_of("verify rank 0")
    stream = _long_stream(service)
    death(cluster, victim)
    assert stream.result() == undisturbed
    after = until(lambda: _reformed_since(ready, service), timeout_s=60)
    assert after["num_interruptions"] > ready["num_interruptions"]
    assert service.host_of("verify rank 0") != victim


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_host_and_what_it_was_to_do(
    service: HostsService, undisturbed: list[int], ready: dict[str, Any]
) -> None:
    rank = _workers(ready)["verify rank 1"]
    stream = _long_stream(service)
    os.kill(rank["pid"], signal.SIGSTOP)
    troubled = until(lambda: _troubled_since(ready, service), timeout_s=DEADLINE_S + _SLACK_S)
    assert stream.result() == undisturbed
    where = re.escape(rank["host"])
    assert re.search(
        rf"lost verify rank 1\b.*{where}.* during .+: no (answer|reply) within {DEADLINE_S:g} s",
        troubled["last_trouble"],
    )


def _troubled_since(before: dict[str, Any], service: HostsService) -> dict[str, Any] | None:
    state = service.pipeline()
    return state if state["num_interruptions"] > before["num_interruptions"] else None


def _reformed_since(before: dict[str, Any], service: HostsService) -> dict[str, Any] | None:
    state = service.pipeline()
    return state if state["is_ready"] and state["epoch"] > before["epoch"] else None
