"""`eesd bench online`: measures a running service under load from its clients' side.

Overlap is a setting of the service, so that comparing on and off takes two runs of it
(`make bench-online`).
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import httpx
import msgspec

from eesd_dist.bench.load_client import (
    Streamed,
    ask,
    client_of,
    model_served_at,
    offer,
    read_bodies,
)
from eesd_dist.bench.options import OnlineOptions
from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.bench.round_breakdown import ms_per_round
from eesd_dist.errors import EngineError
from eesd_dist.statistics import percentile
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


def sample_of(stream: Streamed) -> Sample:
    """Returns a request's measurements. Raises EngineError with the service's message if it
    failed."""
    if not stream.is_complete or stream.num_tokens is None:
        raise EngineError(stream.error or "the stream ended before its text")
    arrivals = stream.arrivals_s or (stream.ended_s,)
    draft = stream.metrics.get("speculative_decoding") or {}
    return Sample(
        first_token_s=arrivals[0] - stream.start_s,
        gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
        total_s=stream.ended_s - stream.start_s,
        num_tokens=stream.num_tokens,
        num_drafted=draft.get("num_draft_tokens", 0),
        num_accepted=draft.get("num_accepted_draft_tokens", 0),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns p50, p95 and p99 in milliseconds."""
    if not values:
        return {}
    return {f"p{p}": round(1e3 * percentile(values, p / 100), 2) for p in (50, 95, 99)}


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
    async with client_of(url) as client:
        options = {
            "model": await asyncio.to_thread(model_served_at, url),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        by_mode = {
            mode: [body | options | {"speculation": {"mode": mode}} for body in bodies]
            for mode in MODES
        }
        for requests in by_mode.values():
            await _in_turn(client, requests[:3])
        samples = await _in_turn(client, by_mode["off"][:6])
        single_s = statistics.median(sample.total_s for sample in samples)
        single_rounds = {"off": ms_per_round(await _rounds(client, len(samples)))}
        await _in_turn(client, by_mode["auto"][:6])
        single_rounds["auto"] = ms_per_round(await _rounds(client, len(samples)))
        rows: list[dict[str, Any]] = []
        for load in loads:
            for mode, requests in by_mode.items():
                offered = list(islice(cycle(requests), max(per_load, 2 * load)))
                began_s = time.perf_counter()
                streams = await offer(client, offered, rate_per_s=load / single_s, seed=seed + load)
                wall_s = time.perf_counter() - began_s
                row: dict[str, Any] = {"load": load, "speculation": mode}
                row |= row_of([sample_of(stream) for stream in streams], wall_s)
                rows.append(row)
                say(
                    f"load {load:3} {mode:5} {row['tokens_per_s']:8.1f} tok/s"
                    f"  ttft p50 {row['ttft_ms']['p50']:8.1f} ms"
                    f"  per token p50 {row['time_per_token_ms']['p50']:7.2f} ms"
                )
        rounds = ms_per_round(await _rounds(client, None))
    return {"alone_s": round(single_s, 4), "rows": rows, "alone": single_rounds, "rounds": rounds}


async def _in_turn(
    client: httpx.AsyncClient, bodies: Sequence[Mapping[str, object]]
) -> list[Sample]:
    return [sample_of(await ask(client, body)) for body in bodies]


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
    print_report(report, seed=options.seed)
