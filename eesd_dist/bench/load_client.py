"""The load client of all benchmarks: streamed requests, their tokens, times and ends.

Speaks HTTP and server-sent events, and reports broken streams instead of raising, since callers
count them. On request it resumes them, as a client with patience does. Does not check the text.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx

from eesd_dist.errors import ConfigError

_TIMEOUT_S = 300.0
_RESUME_PAUSE_S = 0.25
_STATUS_TO_REPEAT = frozenset({404, 429, 500, 502, 503, 504})
"""Answers of a front that is being replaced; 404: its routes are not known yet."""


@dataclass(slots=True, kw_only=True)
class Streamed:
    """A stream, finished or as far as it was heard; times are on the client's monotonic clock."""

    name: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    num_tokens: int | None = None
    """The service's count; None if the stream ended before it arrived."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The service's figures, in the chunk of the usage."""
    finish_reason: str | None = None
    is_done: bool = False
    """True if `[DONE]` was received."""
    num_resumed: int = 0
    """Number of times that its connection broke and it continued on another one."""
    num_turned_away: int = 0
    """Number of errors answered by a front that was being replaced."""
    error: str | None = None
    """Error of the service or the connection."""
    start_s: float
    arrivals_s: tuple[float, ...] = ()
    """Times of chunks with tokens."""
    ended_s: float

    @property
    def is_complete(self) -> bool:
        return self.finish_reason is not None and self.is_done and self.error is None

    @property
    def longest_pause_s(self) -> float:
        """Longest time between two chunks with tokens, or before the first."""
        times = (self.start_s, *self.arrivals_s)
        return max((b - a for a, b in pairwise(times)), default=0.0)


class Listener:
    """Parses one stream line by line; `heard` returns the state so far at any time."""

    def __init__(self, name: str) -> None:
        time_s = time.monotonic()
        self._stream = Streamed(name=name, start_s=time_s, ended_s=time_s)
        self._event_id = ""
        """Id of the event that is being received."""
        self._last_event_id = ""

    @property
    def is_over(self) -> bool:
        return self._stream.is_done or self._stream.error is not None

    @property
    def headers(self) -> dict[str, str]:
        """Headers that a request needs to begin this stream or to continue it."""
        if self._last_event_id:
            return {"Last-Event-ID": self._last_event_id}
        return {"X-Eesd-Event-Ids": "true"}

    def hear(self, line: str) -> None:
        if line == "data: [DONE]":
            self._stream.is_done = True
        elif line.startswith("id: "):
            self._event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            self._take(json.loads(line.removeprefix("data: ")))
            self._last_event_id = self._event_id or self._last_event_id
            self._event_id = ""

    def answered(self) -> None:
        """A request was accepted, the first one or one that continues."""
        self._event_id = ""
        if self._last_event_id:
            self._stream.num_resumed += 1
        else:
            self._stream.text = ""  # an echoed prompt comes again

    def turned_away(self) -> None:
        self._stream.num_turned_away += 1

    def fail(self, error: str) -> None:
        self._stream.error = self._stream.error or error

    def heard(self) -> Streamed:
        return replace(self._stream, ended_s=time.monotonic())

    def _take(self, chunk: Mapping[str, Any]) -> None:
        if "error" in chunk:
            self.fail(str(chunk["error"]["message"]))
            return
        stream = self._stream
        if chunk.get("usage"):
            stream.num_tokens = chunk["usage"]["completion_tokens"]
            stream.metrics = chunk.get("metrics") or {}
        for choice in chunk["choices"]:
            stream.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
            if choice.get("token_ids"):
                stream.tokens += tuple(choice["token_ids"])
                stream.arrivals_s += (time.monotonic(),)


async def stream(
    client: httpx.AsyncClient,
    listener: Listener,
    body: Mapping[str, object],
    *,
    max_attempts: int = 1,
) -> None:
    """Sends the request and reads the stream to its end or error. When the connection breaks, or
    the front that would answer is being replaced, the request is sent again and continues after the
    last event."""
    trouble = ""
    for attempt in range(max_attempts):
        if attempt:
            await asyncio.sleep(_RESUME_PAUSE_S)
        trouble = await _trouble(client, listener, body, repeats=max_attempts > 1)
        if listener.is_over:
            return
    listener.fail(trouble)


async def _trouble(
    client: httpx.AsyncClient, listener: Listener, body: Mapping[str, object], *, repeats: bool
) -> str:
    """Reads one connection to its end; returns what broke it."""
    try:
        async with client.stream(
            "POST", route_of(body), json=dict(body), headers=listener.headers
        ) as response:
            if response.status_code == 200:
                listener.answered()
                async for line in _lines(response):
                    listener.hear(line)
                return "the connection ended before [DONE]"
            text = (await response.aread()).decode(errors="replace")
            refusal = f"the service answered {response.status_code}: {text[:500]}"
            if not repeats or response.status_code not in _STATUS_TO_REPEAT:
                listener.fail(refusal)
            else:
                listener.turned_away()
            return refusal
    except httpx.HTTPError as error:
        return f"the connection broke: {type(error).__name__}: {error}"


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yields whole lines. `aiter_lines` also splits at characters that texts have, e.g. U+0085."""
    remainder = b""
    async for chunk in response.aiter_bytes():
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            yield line.decode()


def client_of(url: str, *, concurrency: int | None = None) -> httpx.AsyncClient:
    """Returns a client of a service, with at most `concurrency` connections."""
    limits = httpx.Limits(max_connections=concurrency)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=httpx.Timeout(_TIMEOUT_S))


def model_served_at(url: str) -> str:
    """Returns the name of a service's model. Raises ConfigError where none answers with it."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=_TIMEOUT_S)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ConfigError(f"--url {url}: found no service with a model: {error}") from error


def route_of(body: Mapping[str, object]) -> str:
    """Returns the path that takes the request."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def ask(
    client: httpx.AsyncClient, body: Mapping[str, object], *, max_attempts: int = 1
) -> Streamed:
    """Sends one request and returns its stream, named by its `request_id`."""
    listener = Listener(str(body.get("request_id", "")))
    await stream(client, listener, body, max_attempts=max_attempts)
    return listener.heard()


async def ask_all(
    url: str,
    bodies: Sequence[Mapping[str, object]],
    *,
    concurrency: int,
    max_attempts: int = 1,
) -> list[Streamed]:
    """Closed loop: `concurrency` requests at a time; returns their streams in the same order."""
    streams: dict[int, Streamed] = {}
    waiting = iter(enumerate(bodies))

    async def work(client: httpx.AsyncClient) -> None:
        for index, body in waiting:
            streams[index] = await ask(client, body, max_attempts=max_attempts)

    async with client_of(url, concurrency=concurrency) as client:
        await asyncio.gather(*[work(client) for _ in range(concurrency)])
    return [streams[index] for index in range(len(bodies))]


async def offer(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, object]],
    *,
    rate_per_s: float,
    seed: int,
) -> list[Streamed]:
    """Open loop: sends each request at its time of a seeded Poisson process."""
    rng = Random(seed)
    tasks: list[asyncio.Task[Streamed]] = []
    for body in bodies:
        tasks.append(asyncio.create_task(ask(client, body)))
        await asyncio.sleep(rng.expovariate(rate_per_s))
    return list(await asyncio.gather(*tasks))


def read_bodies(path: Path) -> list[dict[str, Any]]:
    """Reads a file of prompts as request bodies. Raises ConfigError for a row without one."""
    bodies: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if "question" in row:
            bodies.append({"messages": [{"role": "user", "content": row["question"]}]})
        elif "messages" in row or "prompt" in row:
            bodies.append({key: row[key] for key in ("messages", "prompt") if key in row})
        else:
            raise ConfigError(f"{path}:{number}: found {sorted(row)}, expected messages or prompt")
    return bodies
