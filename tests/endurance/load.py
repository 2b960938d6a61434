"""Clients that keep a service busy: streams, streams that are left, several choices, bad requests.

Every answer is checked: tokens and texts against those that the same requests had before, and bad
requests for an answer that says so. The clients pause together when they are asked to, so that the
idle service can be read.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random

import httpx

from eesd_dist.bench.load_client import Listener, Streamed, ask, client_of, route_of
from serve_app.bench.chaos.report import fate_of, same_until

_MAX_EXAMPLES = 20

Body = Mapping[str, object]
Texts = tuple[str, ...]

BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b'{"prompt": "x", "max_tokens": "many"}'),
    ("/v1/completions", b'{"prompt": "x", "n": 100000}'),
    ("/v1/completions", b'{"prompt": "x", "temperature": -1}'),
    ("/v1/completions", b'{"prompt": '),
    ("/v1/completions", b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}"),
    ("/v1/completions", b'{"prompt": "' + b"word " * 40_000 + b'"}'),
    ("/v1/completions", b'{"prompt": "x", "model": "of another service"}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "unknown", "content": "x"}]}'),
    ("/v1/chat/completions", b"\xff\xfe{}"),
    ("/tokenize", b"[]"),
)


@dataclass(slots=True, kw_only=True)
class Answers:
    """What came back."""

    counts: Counter[str] = field(default_factory=Counter)
    """Requests by kind."""
    num_tokens: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    """Answers that are not as they should be, by how they are wrong."""
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, problem: str | None, *, name: str) -> None:
        self.counts[kind] += 1
        if problem is not None:
            self.wrong[f"{kind}: {problem.partition(':')[0]}"] += 1
            self.examples = [*self.examples, f"{name}: {problem}"][:_MAX_EXAMPLES]


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The requests, and what each of them gives when nothing is disturbed."""

    streams: Sequence[tuple[Body, Streamed]]
    choices: Sequence[tuple[Body, Texts]]


class Load:
    """The clients of one service."""

    def __init__(self, url: str, references: References, *, concurrency: int, seed: int) -> None:
        self.answers = Answers()
        self._url = url
        self._references = references
        self._concurrency = concurrency
        self._rng = Random(seed)
        self._numbers = count()
        self._num_active = 0
        self._may_ask = asyncio.Event()
        self._is_idle = asyncio.Event()

    async def run(self, until: asyncio.Event) -> None:
        """Sends requests until the event is set; returns when all have been answered."""
        self._may_ask.set()
        async with client_of(self._url, concurrency=self._concurrency) as client:
            await asyncio.gather(*[self._work(client, until) for _ in range(self._concurrency)])

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Within the block no request is under way."""
        self._may_ask.clear()
        try:
            if self._num_active:
                await self._is_idle.wait()
            yield
        finally:
            self._may_ask.set()

    async def _work(self, client: httpx.AsyncClient, until: asyncio.Event) -> None:
        while not until.is_set():
            await self._may_ask.wait()
            self._num_active += 1
            self._is_idle.clear()
            try:
                await self._kind()(self, client)
            finally:
                self._num_active -= 1
                if not self._num_active:
                    self._is_idle.set()

    def _kind(self) -> "Kind":
        weights = [weight for weight, _ in _KINDS.values()]
        return self._rng.choices([kind for _, kind in _KINDS.values()], weights)[0]

    async def whole_stream(self, client: httpx.AsyncClient) -> None:
        body, reference = self._rng.choice(self._references.streams)
        name = self._name()
        streamed = await ask(client, {**body, "request_id": name})
        self.answers.num_tokens += len(streamed.tokens)
        fate = fate_of(reference, streamed)
        problem = None if fate == "same" else f"{fate}: {streamed.error or 'no error'}"
        self.answers.note("stream", problem, name=name)

    async def left_stream(self, client: httpx.AsyncClient) -> None:
        """Reads a few lines and leaves."""
        body, reference = self._rng.choice(self._references.streams)
        name = self._name()
        listener = Listener(name)
        num_lines = self._rng.randrange(40)
        try:
            async with client.stream(
                "POST", route_of(body), json={**body, "request_id": name}
            ) as r:
                async for line in r.aiter_lines():
                    listener.hear(line)
                    if not (num_lines := num_lines - 1) > 0:
                        break
        except httpx.HTTPError as error:
            listener.fail(repr(error))
        streamed = listener.heard()
        self.answers.num_tokens += len(streamed.tokens)
        is_same = same_until(reference.tokens, streamed.tokens) == len(streamed.tokens)
        problem = streamed.error or (None if is_same else "changed")
        self.answers.note("left", problem, name=name)

    async def several_choices(self, client: httpx.AsyncClient) -> None:
        body, reference = self._rng.choice(self._references.choices)
        name = self._name()
        texts, error = await choices_of(client, {**body, "request_id": name})
        problem = error or (None if texts == reference else "changed")
        self.answers.note("choices", problem, name=name)

    async def bad_request(self, client: httpx.AsyncClient) -> None:
        path, content = self._rng.choice(BAD_BODIES)
        headers = {"Content-Type": "application/json"}
        try:
            status = (await client.post(path, content=content, headers=headers)).status_code
            problem = None if 400 <= status < 500 else f"status {status}"
        except httpx.HTTPError as error:
            problem = f"no answer: {error!r}"
        self.answers.note("bad", problem, name=f"{path} {content[:60]!r}")

    def _name(self) -> str:
        return f"endure-{next(self._numbers)}"


Kind = Callable[[Load, httpx.AsyncClient], Awaitable[None]]

_KINDS: Mapping[str, tuple[int, Kind]] = {
    "stream": (68, Load.whole_stream),
    "left": (15, Load.left_stream),
    "choices": (7, Load.several_choices),
    "bad": (10, Load.bad_request),
}
"""Of each kind so many among a hundred."""


async def choices_of(client: httpx.AsyncClient, body: Body) -> tuple[Texts, str | None]:
    """Returns the texts of a request that is not streamed, or the error."""
    try:
        response = await client.post(route_of(body), json=dict(body))
    except httpx.HTTPError as error:
        return (), f"no answer: {error!r}"
    if response.status_code != 200:
        return (), f"status {response.status_code}: {response.text[:300]}"
    choices = sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))
    return tuple(c["text"] if "text" in c else c["message"]["content"] for c in choices), None


def not_streamed(body: Body, *, n: int) -> Body:
    """Returns the same request for several choices at once."""
    return {key: field for key, field in body.items() if not key.startswith("stream")} | {"n": n}
