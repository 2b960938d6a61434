"""What traces cost a running service: requests, figures and the table of `eesd bench tracing`.

All variants answer the same requests in turns, so that a slower machine affects all of them. Each
block of requests is compared with that of the variant without tracing in the same turn.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import count
from random import Random

import httpx

from eesd_dist.bench.output import Say, print_report, say_unless
from eesd_dist.provenance import collect_provenance
from eesd_dist.text.prompts import load_prompts
from eesd_dist.text.tokenizer import Tokenizer
from serve_app.bench.options import TracingBenchOptions

_SETTLE_S = 1.0
"""After a block: spans are sent every half second, and their cost belongs to the block."""
_TIMEOUT_S = 300.0
_QUICK_REPEATS = 1
_REPEATS = 20
_NUM_DRAWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    name: str
    service: str
    """Which of the services answers."""
    every: int = 0
    """One request in so many is traced, by its traceparent; 0: the service decides."""


OFF = Variant(name="off", service="off")
VARIANTS = (
    OFF,
    Variant(name="default: kept in memory, few", service="kept"),
    Variant(name="1 %, sent to a collector", service="sent", every=100),
    Variant(name="100 %, sent to a collector", service="sent", every=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Running services that differ in tracing alone."""

    urls: Mapping[str, str]
    num_spans: Callable[[], int]
    """Those that the collector has received so far."""
    cpu_seconds: Callable[[], float]
    """Processor time of all processes of the services so far, and of Ray's."""


Start = Callable[[TracingBenchOptions], AbstractContextManager[Services]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some requests, all of them sent at once."""

    seconds: float
    cpu_s: float
    num_tokens: int
    texts: tuple[str, ...]


class Bench:
    """Sends blocks of requests."""

    def __init__(
        self, services: Services, prompts: Sequence[Sequence[int]], *, max_tokens: int
    ) -> None:
        self._services = services
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._random = Random(0)
        self._sent = {variant: count() for variant in VARIANTS}

    async def block(self, variant: Variant) -> Block:
        url = self._services.urls[variant.service]
        before_s, began_s = self._services.cpu_seconds(), time.perf_counter()
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
            asked = [self._ask(client, prompt, variant) for prompt in self._prompts]
            answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began_s
        await asyncio.sleep(_SETTLE_S)
        return Block(
            seconds=seconds,
            cpu_s=self._services.cpu_seconds() - before_s,
            num_tokens=sum(num_tokens for _, num_tokens in answers),
            texts=tuple(text for text, _ in answers),
        )

    async def _ask(
        self, client: httpx.AsyncClient, prompt: Sequence[int], variant: Variant
    ) -> tuple[str, int]:
        body = {"prompt": list(prompt), "max_tokens": self._max_tokens, "temperature": 0}
        answer = await client.post(
            "/v1/completions", json=body | {"ignore_eos": True}, headers=self._headers(variant)
        )
        answer.raise_for_status()
        page = answer.json()
        return page["choices"][0]["text"], page["usage"]["completion_tokens"]

    def _headers(self, variant: Variant) -> dict[str, str]:
        if not variant.every:
            return {}
        is_traced = next(self._sent[variant]) % variant.every == 0
        trace_id, span_id = self._random.getrandbits(128) | 1, self._random.getrandbits(64) | 1
        return {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-{is_traced:02x}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant over the one without tracing, in all turns, with a 95 % interval."""

    variant: str
    tokens_per_s: float
    speed: tuple[float, float, float]
    cpu: tuple[float, float, float]


def rows_of(blocks: Mapping[Variant, Sequence[Block]]) -> list[Row]:
    off = blocks[OFF]
    return [
        Row(
            variant=variant.name,
            tokens_per_s=statistics.median(each.num_tokens / each.seconds for each in mine),
            speed=_ratio([each.seconds for each in off], [each.seconds for each in mine]),
            cpu=_ratio([each.cpu_s for each in mine], [each.cpu_s for each in off]),
        )
        for variant, mine in blocks.items()
    ]


def _ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Returns the ratio of the medians, which one disturbed turn hardly moves, and its 95 %
    percentile bootstrap over turns (Efron 1979)."""
    random, turns = Random("bootstrap"), range(len(above))

    def ratio(chosen: Sequence[int]) -> float:
        return statistics.median(above[turn] for turn in chosen) / statistics.median(
            below[turn] for turn in chosen
        )

    drawn = sorted(ratio(random.choices(turns, k=len(turns))) for _ in range(_NUM_DRAWS))
    low, high = drawn[int(0.025 * _NUM_DRAWS)], drawn[int(0.975 * _NUM_DRAWS)]
    return ratio(turns), low, high


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'tracing':<30}{'tokens/s':>9}   {'speed over off':<25}processor time over off"]
    for row in rows:
        speed, cpu = (f"{m:.3f} ({low:.3f} to {high:.3f})" for m, low, high in (row.speed, row.cpu))
        lines.append(f"{row.variant:<30}{row.tokens_per_s:>9.0f}   {speed:<25}{cpu}")
    return "\n".join(lines)


async def _measured(bench: Bench, *, repeats: int, say: Say) -> dict[Variant, list[Block]]:
    blocks: dict[Variant, list[Block]] = {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:  # warms up: compiled calls, connections, pages
        await bench.block(variant)
    for turn in range(repeats):
        first = turn % len(VARIANTS)
        for variant in VARIANTS[first:] + VARIANTS[:first]:
            blocks[variant].append(await bench.block(variant))
        say(f"turn {turn + 1} of {repeats}")
    return blocks


def run(options: TracingBenchOptions, *, start: Start) -> int:
    say = say_unless(options.json)
    repeats = options.repeats or (_QUICK_REPEATS if options.quick else _REPEATS)
    tokenizer = Tokenizer.load(options.model)
    prompts = [prompt.tokens for prompt in load_prompts(tokenizer, options.prompts)]
    chosen = [prompts[number % len(prompts)] for number in range(options.concurrency)]
    say("starting three services ...")
    with start(options) as services:
        bench = Bench(services, chosen, max_tokens=options.max_tokens)
        blocks = asyncio.run(_measured(bench, repeats=repeats, say=say))
        num_spans = services.num_spans()
    rows = rows_of(blocks)
    say(table(rows))
    texts = {block.texts for each in blocks.values() for block in each}
    if len(texts) > 1:
        say("a text differs between blocks")
    print_report(
        {
            "rows": [asdict(row) for row in rows],
            "blocks": {
                variant.name: {
                    "seconds": [round(block.seconds, 4) for block in each],
                    "cpu_s": [round(block.cpu_s, 3) for block in each],
                }
                for variant, each in blocks.items()
            },
            "texts_changed": len(texts) - 1,
            "spans_received": num_spans,
            "repeats": repeats,
            "concurrency": options.concurrency,
            "max_tokens": options.max_tokens,
            "verify_tp": options.verify_tp,
            "provenance": collect_provenance(seed=0).as_json(),
        }
    )
    return 1 if len(texts) > 1 else 0
