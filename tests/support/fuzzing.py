"""Sends random requests to a server, perhaps while another client pings it, and checks every
answer. A request is a function of the seed and its number, so that one alone can be repeated."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.support.raw_http import Reply, events_until, exchange, exchanges, get
from tests.support.request_fuzzer import FuzzedRequest, RequestFuzzer
from tests.support.valid_bodies import outcome, texts_of

_PING_EVERY_S = 0.05
_OVERLOAD = frozenset({"queue_full", "no_capacity", "request_expired"})
_ERROR_KEYS = {"message", "type", "param", "code"}
_SHOWN_CHARS = 1500


class Wrong(AssertionError):
    """An answer that may not be."""


@dataclass(slots=True, kw_only=True)
class Fuzzing:
    """What came back."""

    num_requests: int = 0
    """Requests, each of a connection counted, with those that repeat others."""
    num_valid: int = 0
    num_compared: int = 0
    """Answers that were compared with those by plain decoding."""
    num_resumed: int = 0
    """Streams that were left and resumed."""
    num_stuck: int = 0
    """Requests without an answer in time."""
    overloads: Counter[int] = field(default_factory=Counter)
    """Answers 429 and 503 that say that there is too much work."""
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int | None] = field(default_factory=Counter)
    """None: no answer, where the client did not wait for one or sent no request."""
    failures: list[str] = field(default_factory=list)
    pings_s: list[float] = field(default_factory=list)
    """Seconds of each ping, in rising order."""

    def __str__(self) -> str:
        answers = ", ".join(
            f"{num} {status}" for status, num in sorted(self.statuses.items(), key=str)
        )
        text = (
            f"{self.num_requests} requests, {self.num_valid} valid; answers: {answers}; "
            f"{self.num_compared} compared; {self.num_resumed} resumed"
        )
        if self.pings_s:
            p99_s = self.pings_s[int(0.99 * len(self.pings_s))]
            text += (
                f"; {len(self.pings_s)} pings: p99 {1e3 * p99_s:.0f} ms, "
                f"max {1e3 * self.pings_s[-1]:.0f} ms"
            )
        return text


def request_of(seed: int, number: int, fuzzer: RequestFuzzer) -> FuzzedRequest:
    return fuzzer.request(Random(f"{seed} {number}"))


async def fuzz(
    port: int,
    numbers: Iterable[int],
    *,
    seed: int,
    fuzzer: RequestFuzzer | None = None,
    num_pings: int = 0,
    at_once: int = 16,
    timeout_s: float = 30.0,
    max_failures: int = 20,
) -> Fuzzing:
    """Sends the requests of these numbers. Failures are listed with the number of the request; at
    `max_failures` no more is sent."""
    fuzzer = fuzzer or RequestFuzzer()
    fuzzing = Fuzzing()
    left = iter(numbers)
    client = _Client(port, fuzzing, timeout_s=timeout_s)

    async def send_some() -> None:
        for number in left:
            request = request_of(seed, number, fuzzer)
            fuzzing.kinds[request.kind] += 1
            try:
                await client.send(request)
            except (Wrong, TimeoutError, ConnectionError, ValueError, KeyError) as error:
                is_stuck = isinstance(error, TimeoutError)
                fuzzing.num_stuck += is_stuck
                message = f"stuck: no answer within {timeout_s:g} s" if is_stuck else f"{error!r}"
                fuzzing.failures.append(
                    f"request {number} ({request.kind}): {message}\n  {request}"
                )
            if len(fuzzing.failures) >= max_failures:
                return

    is_over = asyncio.Event()
    pinging = asyncio.create_task(_pings(port, num_pings, until=is_over))
    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(send_some())
    finally:
        is_over.set()
    fuzzing.pings_s = sorted(await pinging)
    return fuzzing


class _Client:
    def __init__(self, port: int, fuzzing: Fuzzing, *, timeout_s: float) -> None:
        self._port = port
        self._fuzzing = fuzzing
        self._timeout_s = timeout_s

    async def send(self, request: FuzzedRequest) -> None:
        if request.others:
            await self._send_all(request)
        elif request.leaves_after is not None:
            await self._resume(request, num_ids=request.leaves_after)
        else:
            reply = self._counted(
                await exchange(
                    self._port, *request.segments, leaves=request.leaves, timeout_s=self._timeout_s
                ),
                is_valid=request.is_valid,
            )
            await self._compare(request, reply)

    async def _send_all(self, request: FuzzedRequest) -> None:
        (first,) = request.segments
        assert isinstance(first, bytes)
        replies = await exchanges(
            self._port,
            *(first, *request.others),
            pipelined=request.pipelined,
            timeout_s=self._timeout_s,
        )
        for reply in replies:
            self._counted(reply, is_valid=request.is_valid)
        missing = 1 + len(request.others) - len(replies)
        if missing and (request.is_valid or not replies[-1].is_closed):
            raise Wrong(f"{missing} of {1 + len(request.others)} requests were not answered")

    async def _resume(self, request: FuzzedRequest, *, num_ids: int) -> None:
        """Leaves a stream and sends the same request with the id of the last event."""
        (whole,) = request.segments
        assert isinstance(whole, bytes)
        first = self._counted(
            await events_until(self._port, whole, num_ids=num_ids, timeout_s=self._timeout_s),
            is_valid=True,
        )
        if first.status != 200 or request.plain is None:
            return
        shown = _up_to_last_id(first.events)
        if shown:
            line = b" HTTP/1.1\r\nLast-Event-ID: " + shown[-1][0].encode()
            resumption = whole.replace(b" HTTP/1.1", line, 1)
            second = self._counted(
                await exchange(self._port, resumption, timeout_s=self._timeout_s), is_valid=True
            )
            if second.status != 200:
                return
            self._fuzzing.num_resumed += 1
            texts = _texts([*shown, *second.events])
        else:
            texts = _texts(first.events)
        plain = await self._plain(request.plain)
        if plain is not None:
            self._same(texts, _nonempty(texts_of(plain)))

    async def _compare(self, request: FuzzedRequest, reply: Reply) -> None:
        if request.plain is None or reply.status != 200:
            return
        plain = await self._plain(request.plain)
        if plain is None:
            return
        if reply.is_stream:
            self._same(_texts(reply.events), _nonempty(texts_of(plain)))
        else:
            self._same(outcome(json.loads(reply.body)), outcome(plain))

    async def _plain(self, request: bytes) -> dict[str, Any] | None:
        """Returns the answer; None if the service has too much work."""
        reply = self._counted(
            await exchange(self._port, request, timeout_s=self._timeout_s), is_valid=True
        )
        answer: dict[str, Any] = json.loads(reply.body)
        return answer if reply.status == 200 else None

    def _same(self, text: object, plain: object) -> None:
        self._fuzzing.num_compared += 1
        if text != plain:
            raise Wrong(f"differs from plain decoding: {text!r}\n  expected {plain!r}")

    def _counted(self, reply: Reply, *, is_valid: bool) -> Reply:
        """Raises Wrong for an answer that may not be."""
        self._fuzzing.num_requests += 1
        self._fuzzing.num_valid += is_valid
        status = reply.status
        self._fuzzing.statuses[status] += 1
        if status is not None and status >= 400 and _is_overload(reply):
            self._fuzzing.overloads[status] += 1
        elif status is not None and status >= 500:
            raise Wrong(f"answered {_shown(reply)}")
        elif is_valid and status != 200:
            raise Wrong(f"has to be served, was answered {_shown(reply)}")
        elif status is not None and status >= 400:
            _check_error(reply)
        return reply


def _is_overload(reply: Reply) -> bool:
    if reply.status not in (429, 503):
        return False
    _check_error(reply)
    return bool(reply.body) and reply.error["code"] in _OVERLOAD


def _check_error(reply: Reply) -> None:
    try:
        is_error = not reply.body or set(reply.error) == _ERROR_KEYS
    except (KeyError, TypeError, ValueError):
        is_error = False
    if not is_error:
        raise Wrong(f"an error of another shape: {_shown(reply)}")


def _shown(reply: Reply) -> str:
    return repr(reply.raw[:_SHOWN_CHARS])


def _up_to_last_id(events: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    with_ids = [i for i, (name, _) in enumerate(events) if name]
    return events[: with_ids[-1] + 1] if with_ids else []


def _texts(events: list[tuple[str, bytes]]) -> dict[int, str]:
    """Returns the texts of a stream by choice. Raises Wrong for an error in it."""
    texts: dict[int, str] = {}
    for _, data in events:
        if data == b"[DONE]":
            continue
        chunk: dict[str, Any] = json.loads(data)
        if chunk.get("error") or chunk.get("type") == "error":
            raise Wrong(f"an error in a stream: {data[:_SHOWN_CHARS]!r}")
        if chunk.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + chunk["delta"]
        for choice in chunk.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return _nonempty(texts)


def _nonempty(texts: dict[int, str]) -> dict[int, str]:
    return {index: text for index, text in texts.items() if text}


async def _pings(port: int, min_pings: int, *, until: asyncio.Event) -> list[float]:
    seconds: list[float] = []
    while min_pings and (not until.is_set() or len(seconds) < min_pings):
        reply = await exchange(port, get("/ping"))
        assert reply.status == 200, reply.raw
        seconds.append(reply.took_s)
        await asyncio.sleep(_PING_EVERY_S)
    return seconds
