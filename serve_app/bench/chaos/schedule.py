"""What is to be broken and when, and what the streams say of it: the deciding half of chaos.

A seeded schedule names blows; the streams of a disturbed run are held against those of an
undisturbed one with the same seeds, token for token; silences are measured from the blow. Refuses
to know processes, Ray and how anything is broken: `serve_app.bench.chaos.command` does that.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal, get_args

from eesd_dist.bench.streamed import Streamed

Kind = Literal["verify rank", "drafting actor", "router", "hang", "pipeline", "link"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SHARES: Mapping[Kind, int] = {"verify rank": 2}
"""How often a kind comes in one turn of all of them; once where nothing is said."""
UNNOTICED: frozenset[Kind] = frozenset({"router"})
"""Kinds that no stream waits for."""

_SETTLE_S = 1.0
"""Tokens that were on their way already may still arrive so long after a blow."""

Fate = Literal["same", "lost", "repeated", "changed"]
_BAD_FATES: tuple[Fate, ...] = ("lost", "repeated", "changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One blow of the schedule."""

    number: int
    kind: Kind
    when_whole: bool
    """False strikes after `gap_s` even if the one before is not mended yet."""
    gap_s: float
    choice: int
    """Whom it hits: taken modulo the number of those it could hit."""
    comes_back: bool
    """Of one that hangs: whether it wakes up in the end, or is killed."""


def schedule(
    *, seed: int, kinds: Sequence[Kind] = KINDS, mean_gap_s: float = 2.0, at_once: float = 0.25
) -> Iterator[Planned]:
    """Blows without end: all kinds in a random order, then all in another, and so on.

    Gaps are exponential around `mean_gap_s`; a share `at_once` of the blows does not wait until
    the service is whole again, and comes within a second of the one before.
    """
    rng = Random(seed)
    number = 0
    while True:
        turn = [kind for kind in kinds for _ in range(_SHARES.get(kind, 1))]
        rng.shuffle(turn)
        for kind in turn:
            when_whole = number == 0 or rng.random() >= at_once
            yield Planned(
                number=number,
                kind=kind,
                when_whole=when_whole,
                gap_s=rng.expovariate(1.0 / mean_gap_s) if when_whole else rng.random(),
                choice=rng.getrandbits(30),
                comes_back=rng.random() < 0.5,
            )
            number += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One that was dealt."""

    number: int
    kind: Kind
    victim: str
    pipeline: str
    """Empty for the router, who belongs to all."""
    struck_s: float
    """When it was sent on its way."""
    landed_s: float
    """When it had been dealt for certain: on another host up to seconds later."""
    when_whole: bool
    streams: frozenset[str]
    """Names of the requests that the struck pipeline had in its ledger."""


def bodies_of(
    prompts: Sequence[Mapping[str, object]], *, model: str, num: int, seed: int, max_tokens: int
) -> list[dict[str, object]]:
    """Requests of every kind: greedy and sampled, short and long, with and without an early end."""
    rng = Random(seed)
    return [
        {
            **prompts[rng.randrange(len(prompts))],
            **_SAMPLING[i % len(_SAMPLING)],
            "model": model,
            "request_id": name_of(i),
            "seed": rng.getrandbits(40),
            # Many short and some long, as people's requests are.
            "max_tokens": max(4, round(max_tokens * rng.random() ** 1.5)),
            "ignore_eos": rng.random() < 0.7,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i in range(num)
    ]


_SAMPLING: tuple[Mapping[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "speculation": {"mode": "off"}},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
)


def name_of(index: int) -> str:
    return f"chaos-{index}"


def names_in(request_ids: Iterable[str]) -> frozenset[str]:
    """Which of our requests these are, by the service's own ids; others are nobody's concern."""
    return frozenset(found[1] for text in request_ids if (found := _NAME.search(text)))


_NAME = re.compile(r"-(chaos-\d+)-")


def fate_of(undisturbed: Streamed, disturbed: Streamed) -> Fate:
    """A stream that broke off is lost, and repeated or changed only if what did come is so."""
    wanted, got = undisturbed.tokens, disturbed.tokens
    start = same_until(wanted, got)
    if start < len(got):
        return "repeated" if _goes_back(wanted, got, start) else "changed"
    if not disturbed.is_complete:
        return "lost"
    return "same" if _says_the_same(undisturbed, disturbed) else "changed"


def same_until(wanted: Sequence[int], got: Sequence[int]) -> int:
    """How many tokens they begin with in common."""
    pairs = enumerate(zip(wanted, got, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(got)))


def _num_missing(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """How many tokens were left out where the two part; None when it is not that simple."""
    start = same_until(wanted, got)
    rest = len(got) - start
    is_left_out = list(wanted[len(wanted) - rest :]) == list(got[start:])
    return len(wanted) - len(got) if is_left_out and len(got) < len(wanted) else None


def _goes_back(wanted: Sequence[int], got: Sequence[int], start: int) -> bool:
    """Whether `got` goes on, from `start`, with tokens from before `start`."""
    rest = list(got[start:])
    return any(
        list(wanted[origin : origin + len(rest)]) == rest[: len(wanted) - origin]
        for origin in range(start)
    )


def _says_the_same(one: Streamed, other: Streamed) -> bool:
    return (one.tokens, one.text, one.num_tokens, one.finish_reason) == (
        other.tokens,
        other.text,
        other.num_tokens,
        other.finish_reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How long the streams of a struck pipeline were silent, from the blow on.

    Both are infinite where every stream broke off there.
    """

    blow: Blow
    first_s: float
    """Until the first of them had a token again."""
    last_s: float
    """Until the last of them had."""


def recovery_of(blow: Blow, streams: Sequence[Streamed]) -> Recovery | None:
    """None where nobody was listening, or all that did had had their last token."""
    struck = [stream for stream in streams if stream.name in blow.streams]
    silences = [
        silence for stream in struck if (silence := silence_after(blow, stream)) is not None
    ]
    if blow.kind not in UNNOTICED and not silences and any(_broke_off(s, blow) for s in struck):
        silences = [math.inf]
    if blow.kind in UNNOTICED or not silences:
        return None
    return Recovery(blow=blow, first_s=min(silences), last_s=max(silences))


def _broke_off(stream: Streamed, blow: Blow) -> bool:
    return not stream.is_complete and stream.ended_s > blow.struck_s


def silence_after(blow: Blow, stream: Streamed) -> float | None:
    """Seconds from a blow to the token that ends the longest silence around it.

    A silence belongs to the blow when it has begun at most `_SETTLE_S` after it had landed: what
    was on its way when the blow fell still arrives and proves nothing.
    """
    times = (stream.asked_s, *stream.arrivals_s)
    around = [
        (after - before, after - blow.struck_s)
        for before, after in pairwise(times)
        if after > blow.struck_s and before <= blow.landed_s + _SETTLE_S
    ]
    return max(around)[1] if around else None


def _is_alone(recovery: Recovery, others: Sequence[Recovery]) -> bool:
    """Whether none of its streams waited for the end of another blow at the same time."""
    start, end = recovery.blow.struck_s, recovery.blow.struck_s + recovery.last_s
    return not any(
        other.blow.number != recovery.blow.number
        and other.blow.streams & recovery.blow.streams
        and other.blow.struck_s < end
        and start < other.blow.struck_s + other.last_s
        for other in others
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest rank: the smallest value that so large a share does not exceed."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 3)


def complaints(report: Mapping[str, object]) -> list[str]:
    """Why a report is none of a service that was broken and kept every stream; empty: it is."""
    found = [f"{report[fate]} streams {fate}" for fate in _BAD_FATES if report[fate]]
    if not report["kills"]:
        found.append("nothing was broken: give it longer streams, or more of them")
    if report["ended_early"]:
        found.append("the schedule ended early, since the service was not whole again in time")
    if report["unnoticed"]:
        found.append(f"nobody noticed blows {report['unnoticed']}")
    return found


def summarise(
    undisturbed: Sequence[Streamed], disturbed: Sequence[Streamed], blows: Sequence[Blow]
) -> dict[str, object]:
    """The figures; `recovery_*` are over blows, of the slowest stream that each one hit."""
    fates = [fate_of(one, other) for one, other in zip(undisturbed, disturbed, strict=True)]
    counts = Counter(fates)
    recoveries = [r for blow in blows if (r := recovery_of(blow, disturbed)) is not None]
    last = [recovery.last_s for recovery in recoveries]
    alone = [recovery.last_s for recovery in recoveries if _is_alone(recovery, recoveries)]
    first = [recovery.first_s for recovery in recoveries]
    hits = Counter(name for blow in blows if blow.kind not in UNNOTICED for name in blow.streams)
    return {
        "requests": len(disturbed),
        "kills": len(blows),
        "lost": counts["lost"],
        "repeated": counts["repeated"],
        "changed": counts["changed"],
        "recovery_p50_s": percentile(last, 0.50),
        "recovery_p95_s": percentile(last, 0.95),
        "first_stream_p50_s": percentile(first, 0.50),
        "first_stream_p95_s": percentile(first, 0.95),
        "alone_kills": len(alone),
        "alone_p50_s": percentile(alone, 0.50),
        "alone_p95_s": percentile(alone, 0.95),
        "recovery_by_kind": _by_kind(blows, recoveries),
        "interruptions": hits.total(),
        "interrupted_requests": len(hits),
        "most_interruptions_of_one": max(hits.values(), default=0),
        "longest_pause_s": _longest_pause(disturbed),
        "longest_pause_undisturbed_s": _longest_pause(undisturbed),
        "tokens": sum(len(stream.tokens) for stream in disturbed),
        "undisturbed": pace_of(undisturbed),
        "disturbed": pace_of(disturbed),
        "not_the_same": [
            {
                "request": other.name,
                "fate": fate,
                "tokens_expected": len(one.tokens),
                "tokens": len(other.tokens),
                "same_until": same_until(one.tokens, other.tokens),
                "missing_there": _num_missing(one.tokens, other.tokens),
                "finish_reason": other.finish_reason,
                "error": other.error,
            }
            for one, other, fate in zip(undisturbed, disturbed, fates, strict=True)
            if fate != "same"
        ],
    }


def rows_of(blows: Sequence[Blow], streams: Sequence[Streamed]) -> list[dict[str, object]]:
    """Every blow and what it cost, in order; seconds since the first request."""
    began_s = min((stream.asked_s for stream in streams), default=0.0)
    return [
        {
            "number": blow.number,
            "at_s": round(blow.struck_s - began_s, 3),
            "landed_after_s": round(blow.landed_s - blow.struck_s, 3),
            "kind": blow.kind,
            "victim": blow.victim,
            "pipeline": blow.pipeline,
            "when_whole": blow.when_whole,
            "streams": len(blow.streams),
            "first_stream_s": None if recovery is None else round(recovery.first_s, 3),
            "recovery_s": None if recovery is None else round(recovery.last_s, 3),
        }
        for blow in blows
        for recovery in (recovery_of(blow, streams),)
    ]


def pace_of(streams: Sequence[Streamed]) -> dict[str, float]:
    if not streams:
        return {}
    wall_s = max(s.ended_s for s in streams) - min(s.asked_s for s in streams)
    return {
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(len(streams) / wall_s, 3),
        "tokens_per_s": round(sum(len(s.tokens) for s in streams) / wall_s, 1),
    }


def _by_kind(blows: Sequence[Blow], recoveries: Sequence[Recovery]) -> dict[str, object]:
    by_kind: dict[str, object] = {}
    for kind, num in sorted(Counter(blow.kind for blow in blows).items()):
        ours = [r for r in recoveries if r.blow.kind == kind]
        by_kind[kind] = {
            "kills": num,
            "p50_s": percentile([r.last_s for r in ours], 0.50),
            "p95_s": percentile([r.last_s for r in ours], 0.95),
            "max_s": percentile([r.last_s for r in ours], 1.0),
        }
    return by_kind


def _longest_pause(streams: Sequence[Streamed]) -> float:
    return round(max((stream.longest_pause_s for stream in streams), default=0.0), 3)


def table(report: Mapping[str, object]) -> str:
    """The figures for people."""
    by_kind = report["recovery_by_kind"]
    assert isinstance(by_kind, Mapping)
    lines = [
        f"{report['requests']} requests, {report['kills']} kills: {report['lost']} lost, "
        f"{report['repeated']} repeated, {report['changed']} changed",
        f"from kill to the last stream's next token: p50 {_s(report['recovery_p50_s'])}, "
        f"p95 {_s(report['recovery_p95_s'])}; longest pause {_s(report['longest_pause_s'])}",
        f"{report['alone_kills']} kills with no other one before their end: "
        f"p50 {_s(report['alone_p50_s'])}, p95 {_s(report['alone_p95_s'])}",
        f"{report['interrupted_requests']} requests interrupted {report['interruptions']} times, "
        f"one of them {report['most_interruptions_of_one']} times",
        f"interruptions before the first kill: {report['interruptions_undisturbed']}; "
        f"blows that nobody noticed: {report['unnoticed'] or 'none'}",
        *(f"missed: {missed}" for missed in _texts(report["missed"])),
        *(f"failed: {complaint}" for complaint in complaints(report)),
        "",
        f"{'killed':16} {'times':>6} {'p50':>8} {'p95':>8} {'longest':>8}",
    ]
    for kind, row in by_kind.items():
        lines.append(
            f"{kind:16} {row['kills']:6} {_s(row['p50_s']):>8} {_s(row['p95_s']):>8} "
            f"{_s(row['max_s']):>8}"
        )
    return "\n".join(lines)


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(each) for each in value]


def _s(value: object) -> str:
    if value == math.inf:
        return "never"
    return f"{value:.1f} s" if isinstance(value, float) else "-"
