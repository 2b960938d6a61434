"""While one client attacks, another one is served as if it were alone."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from itertools import cycle

import pytest

from tests.support.gated_server import gated_server, num_live
from tests.support.raw_http import Part, chunk, chunked_head, exchange, get, head, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT_OF_10_MB = b'{"prompt": "' + b"word " * 2_000_000 + b'"}'
MILLION = 1_000_000


def attacks(num_chars: int) -> dict[str, tuple[bytes | Part, ...]]:
    """Requests of one client; `num_chars` is about the longest text that is tokenised."""
    fits = MILLION - 1000
    message = {"role": "user", "content": "x"}
    alternatives = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "max_tokens": 2000}
    nearly = [letter + "a" * 1000 + "b" for letter in "abcdefghijklmnop"]
    bodies: dict[str, tuple[str, object]] = {
        "10 MB prompt": (COMPLETIONS, PROMPT_OF_10_MB),
        "longest prompt": (COMPLETIONS, {"prompt": "word " * (num_chars // 5)}),
        "longest chat": (CHAT, {"messages": [{"role": "user", "content": "x" * num_chars}]}),
        "2 MB to tokenize": ("/tokenize", {"prompt": "word " * 400_000}),
        "longest to tokenize": ("/tokenize", {"prompt": "word " * (num_chars // 5)}),
        "much to detokenize": ("/detokenize", {"tokens": [7] * 200_000}),
        "25,600 choices": (COMPLETIONS, {"prompt": ["a"] * 200, "n": 128}),
        "128 choices": (COMPLETIONS, {"prompt": "a", "n": 128, "max_tokens": 8}),
        "900 levels": (COMPLETIONS, b"[" * 900 + b"]" * 900),
        "a million levels": (COMPLETIONS, b"[" * fits),
        "a million pairs": (COMPLETIONS, b'{"prompt": [' + b"[]," * (fits // 3) + b"[]]}"),
        "a million ids": (COMPLETIONS, {"prompt": [1] * (fits // 3)}),
        "wrong ids": (COMPLETIONS, {"prompt": [["a"]] * (fits // 7)}),
        "many strings": (COMPLETIONS, {"prompt": [""] * (fits // 4)}),
        "many fields": (COMPLETIONS, {str(i): 1 for i in range(fits // 14)}),
        "many biases": (
            COMPLETIONS,
            {"prompt": "x", "logit_bias": {str(i): "a" for i in range(50000)}},
        ),
        "many messages": (CHAT, {"messages": [message] * 20_000}),
        "long options": (
            CHAT,
            {"messages": [message], "chat_template_kwargs": {"bos_token": "x" * num_chars}},
        ),
        "long stops": (COMPLETIONS, {"prompt": "a", "stop": nearly, "max_tokens": 100}),
        "largest answer": (CHAT, {"messages": [message], "n": 6, **alternatives}),
        "larger answer": (CHAT, {"messages": [message], "n": 7, **alternatives}),
        "repeated prompt": (COMPLETIONS, {"prompt": "a " * 1900, "n": 128, "echo": True}),
        "quotation marks": (COMPLETIONS, b"[" * 70 + b'"' + b'\\"' * (fits // 2) + b"\\"),
    }
    requests: dict[str, tuple[bytes | Part, ...]] = {
        name: (post(path, body),) for name, (path, body) in bodies.items()
    }
    requests["not UTF-8"] = (get("/ping", b"X-Name: \xff\xfe"),)
    requests["forged id"] = (post(COMPLETIONS, {"prompt": "x", "request_id": "a\nlogged: b"}),)
    requests["endless chunks"] = (
        chunked_head(COMPLETIONS),
        *(chunk(b"x" * 60_000) for _ in range(100)),
    )
    requests["half a head"] = (b"POST /v1/completions HTTP/1.1\r\nHost",)
    requests["half a body"] = (head(COMPLETIONS, 50), b'{"prompt"')
    requests["slow body"] = (
        head(COMPLETIONS, 50),
        *(Part(data=b" ", pause_s=0.1) for _ in range(49)),
    )
    return requests


async def _attacked(
    port: int,
    requests: Sequence[tuple[bytes | Part, ...]],
    *,
    at_once: int,
    while_running: Callable[[], Awaitable[list[float]]],
) -> list[float]:
    """Sends the requests again and again until `while_running` is done; returns its result."""
    turns = cycle(requests)

    async def attack() -> None:
        while True:
            await exchange(port, *next(turns), timeout_s=100.0)

    attackers = [asyncio.create_task(attack()) for _ in range(at_once)]
    try:
        return await while_running()
    finally:
        for attacker in attackers:
            attacker.cancel()
        results = await asyncio.gather(*attackers, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


async def _pings(port: int, number: int) -> list[float]:
    """Returns the seconds of each, in rising order."""
    seconds = []
    for _ in range(number):
        reply = await exchange(port, get("/ping"))
        assert reply.status == 200
        seconds.append(reply.took_s)
        await asyncio.sleep(0.005)
    return sorted(seconds)


def _under_attack(*, num_pings: int, max_model_len: int, num_chars: int) -> list[float]:
    requests = list(attacks(num_chars).values())
    with gated_server(max_model_len=max_model_len, read_timeout_s=1.0, head_timeout_s=1.0) as port:
        seconds = asyncio.run(
            _attacked(port, requests, at_once=4, while_running=lambda: _pings(port, num_pings))
        )
        assert num_live(port) <= 0
    return seconds


def test_a_client_is_served_while_another_one_attacks() -> None:
    seconds = _under_attack(num_pings=100, max_model_len=2048, num_chars=80_000)
    assert seconds[-1] < 5.0


@pytest.mark.slow
@pytest.mark.parametrize(("max_model_len", "num_chars"), [(2048, 80_000), (131_072, 2 * MILLION)])
def test_pings_take_milliseconds_while_another_client_attacks(
    max_model_len: int, num_chars: int
) -> None:
    # Measures the service, so it needs two quiet cores.
    seconds = _under_attack(num_pings=1000, max_model_len=max_model_len, num_chars=num_chars)
    assert seconds[990] <= 0.2
    assert seconds[-1] <= 1.0


def test_an_attack_costs_its_client_an_error() -> None:
    async def all_answers(port: int) -> dict[str, int | None]:
        statuses = {}
        for name, chunks in attacks(20_000).items():
            reply = await exchange(port, *chunks)
            statuses[name] = reply.status
            if reply.status != HTTPStatus.OK:
                assert reply.error["message"]
                assert set(reply.error) == {"message", "type", "param", "code"}
        return statuses

    with gated_server(read_timeout_s=0.5, head_timeout_s=0.5) as port:
        statuses = asyncio.run(all_answers(port))
    others = {
        "10 MB prompt": 413,
        "2 MB to tokenize": 413,
        "endless chunks": 413,
        "half a head": 408,
        "half a body": 408,
        "slow body": 408,
        "longest to tokenize": 200,
        "128 choices": 200,
        "long stops": 200,
        "largest answer": 200,
        "repeated prompt": 200,
    }
    assert statuses == dict.fromkeys(attacks(1), 400) | others
