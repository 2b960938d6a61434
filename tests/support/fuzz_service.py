"""Random requests against a whole service: no internal error, nothing stuck, no page left in use.

    python -m tests.support.fuzz_service --requests 20000 --seed 1 --report FILE.json
    python -m tests.support.fuzz_service --seed 1 --only 1234     # one request of it again
    python -m tests.support.fuzz_service --url http://127.0.0.1:8000 --requests 100

Without --url a service with the bundled model is started, and stopped at the end; with it, the key
is that of EESD_API_KEY. Exit status 1: something failed, which the report lists.
"""

import argparse
import asyncio
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from eesd_dist.provenance import collect_provenance
from tests.support.fuzzing import Fuzzing, fuzz, request_of
from tests.support.request_fuzzer import RequestFuzzer
from tests.support.served import served

_COMMAND = ("python", "-m", "tests.support.fuzz_service")
_EMPTY_WITHIN_S = 60.0
_REPORT_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a service has in work; nothing once all requests have ended."""

    num_live: int
    num_running: float
    num_waiting: float
    num_open: float
    """HTTP requests, without the one that asks."""
    kv_usage: float
    """Share of the KV pages that requests hold: those of the prefix cache alone are free."""


class ServiceFacts:
    """Reads a service's metrics and state over HTTP."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def metrics(self) -> dict[str, float]:
        """Returns the sum of each metric over pipelines and ingresses."""
        sums: dict[str, float] = {}
        page = self._http.get("/metrics").text
        for name, value in re.findall(r"^eesd_(\w+)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def finished(self) -> dict[str, float]:
        """Returns the texts that engines have finished, by reason."""
        page = self._http.get("/metrics").text
        samples = re.findall(r'eesd_request_success_total\{finished_reason="(\w+)".* (\S+)', page)
        return {
            reason: sum(float(value) for name, value in samples if name == reason)
            for reason in sorted({reason for reason, _ in samples})
        }

    def holdings(self) -> Holdings:
        metrics = self.metrics()
        state = self._state()
        return Holdings(
            num_live=sum(pipeline["num_live"] for pipeline in state["pipelines"]),
            num_running=metrics["num_requests_running"],
            num_waiting=metrics["num_requests_waiting"],
            num_open=metrics["http_open_requests"] - 1,
            kv_usage=metrics["kv_cache_usage_perc"],
        )

    def holdings_at_the_end(self) -> Holdings:
        """Waits for the requests of clients that have left."""
        deadline_s = time.monotonic() + _EMPTY_WITHIN_S
        while True:
            holdings = self.holdings()
            if not any(asdict(holdings).values()) or time.monotonic() > deadline_s:
                return holdings
            time.sleep(0.5)

    def processes(self) -> list[tuple[int, int, int]]:
        """Returns each pipeline's process, its epoch and its interruptions."""
        return [
            (pipeline["pid"], pipeline["epoch"], pipeline["num_interruptions"])
            for pipeline in self._state()["pipelines"]
        ]

    def _state(self) -> Any:
        return self._http.get("/debug/state").raise_for_status().json()


@contextmanager
def facts_of(port: int, *, api_key: str | None) -> Iterator[ServiceFacts]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, headers=headers, timeout=60.0) as http:
        yield ServiceFacts(http)


def campaign(
    port: int,
    facts: ServiceFacts,
    *,
    num_requests: int,
    seed: int,
    at_once: int,
    minutes: float,
    api_key: str | None,
) -> dict[str, Any]:
    """Returns the report."""
    before, processes = facts.metrics(), facts.processes()
    finished_before = facts.finished()
    began_s = time.monotonic()
    fuzzing = asyncio.run(
        fuzz(
            port,
            _numbers(num_requests, minutes=minutes),
            seed=seed,
            fuzzer=_fuzzer(api_key),
            at_once=at_once,
            timeout_s=120.0,
        )
    )
    seconds = time.monotonic() - began_s
    holdings = facts.holdings_at_the_end()
    after = facts.metrics()
    finished = {
        reason: int(number - finished_before.get(reason, 0))
        for reason, number in facts.finished().items()
    }
    failures = list(fuzzing.failures)
    if any(asdict(holdings).values()):
        failures.append(f"left behind {_EMPTY_WITHIN_S:g} s after the last request: {holdings}")
    if facts.processes() != processes:
        failures.append(f"a pipeline was interrupted: {processes} became {facts.processes()}")
    return {
        "benchmark": "fuzz-api",
        "failures": failures,
        "seconds": round(seconds, 1),
        **_counts(fuzzing),
        "engine": {
            "requests": int(_rise(before, after, "router_requests_total")),
            "texts": finished,
            "prompt_tokens": int(_rise(before, after, "prompt_tokens_total")),
            "generated_tokens": int(_rise(before, after, "generation_tokens_total")),
            "drafted": int(_rise(before, after, "spec_decode_num_draft_tokens_total")),
            "accepted": int(_rise(before, after, "spec_decode_num_accepted_tokens_total")),
            "preemptions": int(_rise(before, after, "num_preemptions_total")),
        },
        "at_the_end": asdict(holdings),
    }


def _counts(fuzzing: Fuzzing) -> dict[str, Any]:
    statuses = sorted(fuzzing.statuses.items(), key=lambda item: item[0] or 0)
    return {
        "sent": fuzzing.num_requests,
        "valid": fuzzing.num_valid,
        "statuses": {str(status): number for status, number in statuses},
        "internal_errors": sum(
            number for status, number in fuzzing.statuses.items() if (status or 0) >= 500
        )
        - fuzzing.overloads[503],
        "overloads": {str(status): number for status, number in fuzzing.overloads.items()},
        "stuck": fuzzing.num_stuck,
        "compared_with_plain_decoding": fuzzing.num_compared,
        "resumed": fuzzing.num_resumed,
        "kinds": dict(sorted(fuzzing.kinds.items())),
    }


def _rise(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def _numbers(num_requests: int, *, minutes: float) -> Iterator[int]:
    began_s = shown_s = time.monotonic()
    for number in range(num_requests):
        time_s = time.monotonic()
        if time_s - began_s > 60 * minutes:
            return
        if time_s - shown_s > _REPORT_EVERY_S:
            shown_s = time_s
            sys.stderr.write(f"{number} of {num_requests} after {time_s - began_s:.0f} s\n")
        yield number


def _fuzzer(api_key: str | None) -> RequestFuzzer:
    return RequestFuzzer(api_key=api_key, is_service=True)


def _repeat(port: int, number: int, *, seed: int, api_key: str | None) -> int:
    fuzzer = _fuzzer(api_key)
    sys.stdout.write(f"{request_of(seed, number, fuzzer)}\n")
    fuzzing = asyncio.run(fuzz(port, [number], seed=seed, fuzzer=fuzzer, timeout_s=120.0))
    sys.stdout.write("\n".join(fuzzing.failures) + f"\n{fuzzing}\n")
    return int(bool(fuzzing.failures))


def _provenance(options: argparse.Namespace) -> dict[str, object]:
    words = [*_COMMAND, "--requests", str(options.requests), "--seed", str(options.seed)]
    return collect_provenance(seed=options.seed, command=words).as_json()


def _write(report: dict[str, Any], options: argparse.Namespace) -> None:
    text = json.dumps(report, ensure_ascii=False)
    if options.report is not None:
        options.report.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    for failure in report["failures"]:
        sys.stderr.write(f"{failure}\n")
        if match := re.match(r"request (\d+) ", failure):
            command = [*_COMMAND, "--seed", str(options.seed), "--only", match[1]]
            sys.stderr.write(f"  again: {' '.join(command)}\n")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz_service")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--at-once", type=int, default=24, help="clients at the same time")
    parser.add_argument("--only", type=int, help="number of the one request to send")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--url", help="of a service on this host")
    options = parser.parse_args(words)
    with ExitStack() as stack:
        if options.url is None:
            api_key: str | None = secrets.token_urlsafe(12)
            port = stack.enter_context(served(api_key=str(api_key)))
        else:
            api_key = os.environ.get("EESD_API_KEY")
            port = urlsplit(options.url).port or 80
        if options.only is not None:
            return _repeat(port, options.only, seed=options.seed, api_key=api_key)
        provenance = _provenance(options)
        report = campaign(
            port,
            stack.enter_context(facts_of(port, api_key=api_key)),
            num_requests=options.requests,
            seed=options.seed,
            at_once=options.at_once,
            minutes=options.minutes,
            api_key=api_key,
        )
    _write(report | {"provenance": provenance}, options)
    return int(bool(report["failures"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
