"""Measures attacks without a key on the front of a service that it starts.

python -m tests.support.front_attacks
"""

import asyncio
import json
import random
import re
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from psutil import Process

from tests.support.raw_http import get, head, post
from tests.support.running import descendants
from tests.support.served import served

_KEY = "front-attacks"
_AUTHORIZED = b"Authorization: Bearer " + _KEY.encode()
_NUM_IDS = 1200
_ID_BYTES = 60_000
_NUM_SCRAPERS = 4
_NUM_BODIES = 8
_BODY_BYTES = 60 * 2**20
_NUM_IDLE = 20
_WATCHED_S = 10.0
_OPEN_S = 60.0
_NUM_LEAVING = 30


async def kept_ids(port: int, proxy: Process, *, path: str) -> dict[str, float]:
    """Sends requests with a model id of their own each; returns the proxy's memory in MiB."""

    async def some(num: int) -> None:
        for _ in range(num):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            value = secrets.token_hex(_ID_BYTES // 2).encode()
            writer.write(get(path, b"serve_multiplexed_model_id: " + value))
            await _whole_answer(reader)
            writer.close()

    before = proxy.memory_info().rss
    await asyncio.gather(*(some(_NUM_IDS // 4) for _ in range(4)))
    await asyncio.sleep(2)
    return {"before": before / 2**20, "after": proxy.memory_info().rss / 2**20}


async def scraped(port: int, *, path: str) -> dict[str, float]:
    """Returns another client's milliseconds for five tokens, with and without scrapers."""
    undisturbed = await _completions(port)
    stop = asyncio.Event()
    num_pages = 0

    async def scrape() -> None:
        nonlocal num_pages
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not stop.is_set():
            writer.write(get(path))
            await _whole_answer(reader)
            num_pages += 1
        writer.close()

    scrapers = [asyncio.create_task(scrape()) for _ in range(_NUM_SCRAPERS)]
    beside = await _completions(port)
    stop.set()
    await asyncio.gather(*scrapers)
    return {
        **{f"alone_{name}": value for name, value in undisturbed.items()},
        **{f"beside_{name}": value for name, value in beside.items()},
        "pages_per_s": num_pages / _WATCHED_S,
    }


async def bodies(port: int) -> dict[str, float]:
    """Sends large bodies without a key; returns what the service took of them."""

    async def one() -> tuple[int, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began_s = time.monotonic()
        writer.write(head("/v1/completions", _BODY_BYTES))
        num_bytes = 0
        try:
            while num_bytes < _BODY_BYTES:
                writer.write(b" " * 2**16)
                await writer.drain()
                num_bytes += 2**16
            await reader.read()
        except ConnectionError:
            pass
        took_s = time.monotonic() - began_s
        writer.transport.abort()
        return num_bytes, took_s

    results = await asyncio.gather(*(one() for _ in range(_NUM_BODIES)))
    return {
        "mib_taken": sum(body[0] for body in results) / 2**20,
        "longest_s": max(body[1] for body in results),
    }


async def idle(port: int, *, path: str) -> dict[str, float]:
    """Leaves refused requests incomplete; returns how many connections are open after a minute."""

    async def one() -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began_s = time.monotonic()
        writer.write(head(path, 1_000_000) + b"x")
        try:
            async with asyncio.timeout(10):
                await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x")
            async with asyncio.timeout(_OPEN_S):
                while await reader.read(1000):
                    pass
        except TimeoutError:
            return float("inf")
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
        return time.monotonic() - began_s

    times = await asyncio.gather(*(one() for _ in range(_NUM_IDLE)))
    return {
        "open_at_the_end": sum(seconds == float("inf") for seconds in times),
        "longest_of_others_s": max(
            (seconds for seconds in times if seconds != float("inf")), default=0.0
        ),
    }


async def departures(port: int, proxy: Process) -> dict[str, float]:
    """Leaves streams at random points; returns what is logged and counted as an error of ours."""
    logs = next(Path(file.path).parent for file in proxy.open_files() if "/logs/" in file.path)

    def num_tracebacks() -> int:
        texts = (file.read_text(errors="replace") for file in logs.rglob("*") if file.is_file())
        return sum(text.count("Traceback (most recent call last)") for text in texts)

    before = num_tracebacks()
    body = {"prompt": "the", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    rng = random.Random(1)

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/v1/completions", body, _AUTHORIZED))
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 1.0)):
                while await reader.read(2**16):
                    pass
        writer.transport.abort()

    for _ in range(_NUM_LEAVING // 3):
        await asyncio.gather(*(one() for _ in range(3)))
    await asyncio.sleep(5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(get("/metrics"))
    page = (await _whole_answer(reader)).decode()
    writer.close()
    counts = re.findall(r'http_requests_total{.*/v1/completions",status="(\d+)"} (\S+)', page)
    return {"tracebacks": num_tracebacks() - before} | {
        f"status_{status}": float(count) for status, count in counts
    }


async def _completions(port: int) -> dict[str, float]:
    body = {"prompt": "the", "max_tokens": 5, "ignore_eos": True, "seed": 1}
    request = post("/v1/completions", body, _AUTHORIZED)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times: list[float] = []
    end_s = time.monotonic() + _WATCHED_S
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        writer.write(request)
        await _whole_answer(reader)
        times.append((time.monotonic() - began_s) * 1e3)
        await asyncio.sleep(0.02)
    writer.close()
    cuts = statistics.quantiles(times, n=100)
    return {"p50": statistics.median(times), "p99": cuts[98], "max": max(times)}


async def _whole_answer(reader: asyncio.StreamReader) -> bytes:
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return answer + await reader.readexactly(int(length or b"0"))


def main() -> None:
    with served(api_key=_KEY) as port:
        (proxy,) = [
            process for process in descendants() if "ProxyActor" in " ".join(process.cmdline())
        ]
        measures: dict[str, Callable[[], Coroutine[Any, Any, dict[str, float]]]] = {
            "ids, /ping": lambda: kept_ids(port, proxy, path="/ping"),
            "ids, 401": lambda: kept_ids(port, proxy, path="/v1/models"),
            "scrapers of /metrics": lambda: scraped(port, path="/metrics"),
            "scrapers of /health": lambda: scraped(port, path="/health"),
            "scrapers of /ping": lambda: scraped(port, path="/ping"),
            "readers of pages": lambda: scraped(port, path="/docs/swagger-ui-bundle.js"),
            "bodies": lambda: bodies(port),
            "idle, 401": lambda: idle(port, path="/v1/completions"),
            "idle, 405": lambda: idle(port, path="/ping"),
            "departures": lambda: departures(port, proxy),
        }
        for name, measure in measures.items():
            if len(sys.argv) > 1 and name not in sys.argv[1:]:
                continue
            figures = asyncio.run(measure())
            print(name, json.dumps({key: round(value, 1) for key, value in figures.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
