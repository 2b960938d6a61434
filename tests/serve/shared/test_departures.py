"""Clients that leave the real service: no error in its logs or metrics."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

from tests.support.raw_http import post
from tests.support.running import Running, until

_NUM_LEAVING = 16
_TOLD_S = 2.5
"""An ingress knows of the answers of others by then."""
_BODY = {"prompt": "the quick brown fox", "max_tokens": 3000, "ignore_eos": True}


def test_clients_that_leave_are_no_errors_anywhere(service: Running) -> None:
    node = ray._private.worker._global_node
    assert node is not None
    logs = Path(node.get_logs_dir_path())
    time.sleep(_TOLD_S)
    num_tracebacks, before = _num_tracebacks(logs), _answers(service)
    asyncio.run(_all_leave(service.config.port))
    until(lambda: service.state().num_live == 0)
    until(lambda: sum((_answers(service) - before).values()) >= _NUM_LEAVING // 2)
    # One that left at once may not have reached an ingress.
    assert set(_answers(service) - before) == {"499"}
    assert _num_tracebacks(logs) == num_tracebacks


async def _all_leave(port: int) -> None:
    rng = random.Random(11)

    async def leaves(number: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/v1/completions", {**_BODY, "stream": number % 4 != 0}))
        await writer.drain()
        await asyncio.sleep(rng.uniform(0.0, 0.6))
        writer.transport.abort()

    for first in range(0, _NUM_LEAVING, 4):
        await asyncio.gather(*(leaves(first + number) for number in range(4)))


def _answers(service: Running) -> Counter[str]:
    """Returns the answers of all ingresses to completions, by status."""
    page = httpx.get(f"{service.url}/metrics", timeout=30).text
    answers = Counter[str]()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            is_count = sample.name == "eesd_http_requests_total"
            if is_count and sample.labels["path"] == "/v1/completions":
                answers[sample.labels["status"]] += int(sample.value)
    return answers


def _num_tracebacks(logs: Path) -> int:
    files = [file for file in logs.rglob("*") if file.is_file()]
    return sum(file.read_text(errors="replace").count("Traceback (most recent") for file in files)
