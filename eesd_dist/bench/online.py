"""`eesd bench online`: measures a running service under load from its clients' side.

Overlap is a setting of the service, so that comparing on and off takes two runs of it
(`make bench-online`).
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec

from eesd_dist.bench.options import OnlineOptions
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.bench.rounds import ms_per_round
from eesd_dist.bench.streamed import Listener, stream
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.provenance import collect_provenance
from eesd_dist.types import RoundStats

MODES = ("off", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Measurements of one request at its client; times in seconds."""

    first_token_s: float
    gaps_s: tuple[float, ...]
    """Times between chunks; a chunk may have several tokens."""
    total_s: float
    num_tokens: int
    num_drafted: int
    num_accepted: int


async def ask(
    client: httpx.AsyncClient, model: str, body: dict[str, Any], *, mode: str, max_tokens: int
) -> Sample:
    """Sends one streamed request. Raises EngineError with the service's message if it fails."""
    listener = Listener(mode)
    options = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "speculation": {"mode": mode},
    }
    await stream(client, listener, body | options)
    answer = listener.heard()
    if not answer.is_complete or answer.num_tokens is None:
        raise EngineError(answer.error or "the stream ended before its text")
    arrivals = answer.arrivals_s or (answer.ended_s,)
    draft = answer.metrics.get("speculative_decoding") or {}
    return Sample(
        first_token_s=arrivals[0] - answer.asked_s,
        gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
        total_s=answer.ended_s - answer.asked_s,
        num_tokens=answer.num_tokens,
        num_drafted=draft.get("num_draft_tokens", 0),
        num_accepted=draft.get("num_accepted_draft_tokens", 0),
    )


async def offer(
    client: httpx.AsyncClient,
    model: str,
    bodies: Sequence[dict[str, Any]],
    *,
    mode: str,
    rate_per_s: float,
    max_tokens: int,
    seed: int,
) -> tuple[list[Sample], float]:
    """Sends `bodies` at Poisson times; returns the samples and the seconds from first to last."""
    rng = random.Random(seed)
    started = time.perf_counter()
    tasks: list[asyncio.Task[Sample]] = []
    for body in bodies:
        tasks.append(
            asyncio.create_task(ask(client, model, body, mode=mode, max_tokens=max_tokens))
        )
        await asyncio.sleep(rng.expovariate(rate_per_s))
    samples = await asyncio.gather(*tasks)
    return samples, time.perf_counter() - started


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns p50, p95 and p99 in milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))], 2)
        for p in (50, 95, 99)
    }


def row_of(samples: Sequence[Sample], wall_s: float) -> dict[str, Any]:
    tokens = sum(s.num_tokens for s in samples)
    drafted = sum(s.num_drafted for s in samples)
    return {
        "requests": len(samples),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 1),
        "ttft_ms": percentiles([s.first_token_s for s in samples]),
        "time_per_token_ms": percentiles(
            [(s.total_s - s.first_token_s) / max(1, s.num_tokens - 1) for s in samples]
        ),
        "inter_chunk_ms": percentiles([g for s in samples for g in s.gaps_s]),
        "acceptance": round(sum(s.num_accepted for s in samples) / drafted, 3) if drafted else None,
    }


async def run(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    loads: Sequence[int],
    per_load: int,
    max_tokens: int,
    seed: int,
    say: Say,
) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for mode in MODES:
            for body in bodies[:3]:
                await ask(client, model, body, mode=mode, max_tokens=max_tokens)
        alone = [
            await ask(client, model, body, mode="off", max_tokens=max_tokens) for body in bodies[:6]
        ]
        alone_s = statistics.median(s.total_s for s in alone)
        by_mode: dict[str, dict[str, Any]] = {
            "off": ms_per_round(await _rounds(client, len(alone)))
        }
        for body in bodies[:6]:
            await ask(client, model, body, mode="auto", max_tokens=max_tokens)
        by_mode["auto"] = ms_per_round(await _rounds(client, len(alone)))
        rows: list[dict[str, Any]] = []
        for load in loads:
            chosen = [bodies[i % len(bodies)] for i in range(max(per_load, 2 * load))]
            for mode in MODES:
                samples, wall_s = await offer(
                    client,
                    model,
                    chosen,
                    mode=mode,
                    rate_per_s=load / alone_s,
                    max_tokens=max_tokens,
                    seed=seed + load,
                )
                row: dict[str, Any] = {"load": load, "speculation": mode}
                row |= row_of(samples, wall_s)
                rows.append(row)
                say(
                    f"load {load:3} {mode:5} {row['tokens_per_s']:8.1f} tok/s"
                    f"  ttft p50 {row['ttft_ms']['p50']:8.1f} ms"
                    f"  per token p50 {row['time_per_token_ms']['p50']:7.2f} ms"
                )
        rounds = ms_per_round(await _rounds(client, None))
    return {"alone_s": round(alone_s, 4), "rows": rows, "alone": by_mode, "rounds": rounds}


async def _rounds(client: httpx.AsyncClient, last_requests: int | None) -> list[RoundStats]:
    """Returns the service's latest rounds, of the last `last_requests` requests if given."""
    page = (await client.get("/debug/rounds")).json()
    rounds = msgspec.convert(page["rounds"], list[RoundStats])
    if last_requests is None:
        return rounds
    request_ids = dict.fromkeys(name for row in reversed(rounds) for name in row.request_ids)
    latest = set(islice(request_ids, last_requests))
    return [row for row in rounds if latest & set(row.request_ids)]


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    by = {(row["load"], row["speculation"]): row for row in report["rows"]}
    loads = sorted({load for load, _ in by})
    return {
        "tokens_per_s_on_over_off": {
            load: round(by[load, "auto"]["tokens_per_s"] / by[load, "off"]["tokens_per_s"], 3)
            for load in loads
        },
        "time_per_token_off_over_on": {
            load: round(
                by[load, "off"]["time_per_token_ms"]["p50"]
                / by[load, "auto"]["time_per_token_ms"]["p50"],
                3,
            )
            for load in loads
        },
        "overhead_ms_per_round": {
            mode: row.get("overhead") for mode, row in report["alone"].items()
        },
    }


def read_bodies(path: Path) -> list[dict[str, Any]]:
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


def main(options: OnlineOptions) -> None:
    report = asyncio.run(
        run(
            options.url,
            read_bodies(options.prompts),
            loads=options.loads,
            per_load=options.per_load,
            max_tokens=options.max_tokens,
            seed=options.seed,
            say=say_unless(options.json),
        )
    )
    report = {"summary": summarise(report)} | report
    report["provenance"] = collect_provenance(seed=options.seed).as_json()
    print_report(report)
