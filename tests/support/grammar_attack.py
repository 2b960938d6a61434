"""Measures what costly grammars of one client cost another one, over a real service.

    python -m tests.support.grammar_attack [--seconds 20]

Starts `eesd serve` with two API keys. One client asks for five tokens, one request after the other,
without the attack and while a second client's masks are worked on; then with a known grammar, while
63 grammars of the second client wait to be compiled. Prints a line of JSON.
"""

import argparse
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.served import served

KEYS = ("operator", "attacker", "other")
AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z ]/"
BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
NUM_NEW = 63


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        entries = [{"name": name, "sha256": _sha256(name)} for name in KEYS[1:]]
        keys.write_text(json.dumps({"keys": entries}))
        with served("--set", f"keys_file={keys}", api_key=KEYS[0]) as port:
            print(json.dumps(_measured(f"http://127.0.0.1:{port}", seconds)))  # noqa: T201


def _measured(url: str, seconds: float) -> dict[str, Any]:
    with httpx.Client(base_url=url, headers=_key("other"), timeout=120) as client:
        cached_body = {**BODY, "guided_json": {"type": "object", "properties": {"known": {}}}}
        for body in (BODY, cached_body) * 10:
            client.post("/v1/completions", json=body).raise_for_status()
        without = _times(client, seconds)
        answer: list[Any] = []
        attack = threading.Thread(target=_attack, args=(url, answer.append))
        attack.start()
        time.sleep(1.0)
        under_attack = _times(client, seconds)
        attack.join()
        cached_s = _time(client, cached_body)
        new = [threading.Thread(target=_send_new, args=(url, at)) for at in range(NUM_NEW)]
        for thread in new:
            thread.start()
        time.sleep(0.5)
        queued = _time(client, cached_body)
        for thread in new:
            thread.join()
    return {
        "without": without,
        "under_attack": under_attack,
        "attack": answer[0],
        "known_grammar_s": cached_s,
        "known_grammar_behind_new_ones_s": queued,
    }


def _times(client: httpx.Client, seconds: float) -> dict[str, Any]:
    """Returns percentiles of a request for five tokens, and what /health said during that time."""
    until, times, failed, health = time.monotonic() + seconds, list[float](), 0, set[int]()
    while time.monotonic() < until:
        started = time.monotonic()
        failed += client.post("/v1/completions", json=BODY).status_code != httpx.codes.OK
        times.append(time.monotonic() - started)
        health.add(client.get("/health").status_code)
    return {
        "requests": len(times),
        "failed": failed,
        "p50_ms": round(1e3 * _percentile(times, 0.5), 1),
        "p99_ms": round(1e3 * _percentile(times, 0.99), 1),
        "max_ms": round(1e3 * max(times), 1),
        "health": sorted(health),
    }


def _attack(url: str, put: Callable[[Any], None]) -> None:
    body = {"prompt": "a", "max_tokens": 400, "n": 16, "guided_grammar": AMBIGUOUS}
    started = time.monotonic()
    with httpx.Client(base_url=url, headers=_key("attacker"), timeout=300) as client:
        try:
            reply = client.post("/v1/completions", json={"model": "demo", **body})
            answer_text = f"{reply.status_code}: {reply.text[:300]}"
        except httpx.HTTPError as error:
            answer_text = repr(error)
    put({"seconds": round(time.monotonic() - started, 1), "answer": answer_text})


def _send_new(url: str, at: int) -> None:
    names = {f"field {at} {number}": {"type": "string", "maxLength": 40} for number in range(200)}
    body = {**BODY, "guided_json": {"type": "object", "properties": names}}
    with httpx.Client(base_url=url, headers=_key("attacker"), timeout=300) as client:
        client.post("/v1/completions", json=body)


def _time(client: httpx.Client, body: dict[str, Any]) -> float:
    started = time.monotonic()
    client.post("/v1/completions", json=body).raise_for_status()
    return round(time.monotonic() - started, 3)


def _percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def _sha256(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


if __name__ == "__main__":
    main()
