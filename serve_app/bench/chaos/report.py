"""Evaluates the streams of a chaos run: their fates, their silences and the figures made of them.

The streams of a disturbed run are compared with those of an undisturbed one with the same seeds,
token for token; silences are measured from the fault. Knows neither processes nor Ray.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from eesd_dist.bench.load_client import Streamed
from eesd_dist.statistics import percentile
from serve_app.bench.chaos.faults import fault_named

_SETTLE_S = 1.0
"""Tokens that were sent before a fault may still arrive so long after it."""
_FRONT_IS_BACK_S = 5.0
"""A killed proxy's port is back within so long."""

Fate = Literal["same", "lost", "repeated", "changed"]
_BAD_FATES: tuple[Fate, ...] = ("lost", "repeated", "changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that was injected."""

    number: int
    kind: str
    victim: str
    pipeline: str
    """Empty for the router, which belongs to none."""
    injected_s: float
    """Time of the injection."""
    landed_s: float
    """Time at which it had happened for certain: on another host up to seconds later."""
    when_ready: bool
    streams: frozenset[str]
    """Names of the requests that the pipeline had in its ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """Time and reason with which the service noticed a fault."""

    after_s: float
    """Seconds from the injection, by the clock of the pipeline's node."""
    trouble: str


def fate_of(undisturbed: Streamed, disturbed: Streamed) -> Fate:
    """Returns a stream's fate. One that broke off is lost, unless what came was already wrong."""
    expected, actual = undisturbed.tokens, disturbed.tokens
    start = same_until(expected, actual)
    if start < len(actual):
        return "repeated" if _goes_back(expected, actual, start) else "changed"
    if not disturbed.is_complete:
        return "lost"
    return "same" if _says_the_same(undisturbed, disturbed) else "changed"


def same_until(expected: Sequence[int], actual: Sequence[int]) -> int:
    """Returns how many tokens both have in common at the beginning."""
    pairs = enumerate(zip(expected, actual, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(expected), len(actual)))


def _num_missing(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Returns how many tokens are left out where they diverge; None if others differ too."""
    start = same_until(expected, actual)
    num_suffix = len(actual) - start
    is_left_out = list(expected[len(expected) - num_suffix :]) == list(actual[start:])
    return len(expected) - len(actual) if is_left_out and len(actual) < len(expected) else None


def _goes_back(expected: Sequence[int], actual: Sequence[int], start: int) -> bool:
    """Returns whether `got` goes on, from `start`, with tokens from before `start`."""
    suffix = list(actual[start:])
    return any(
        list(expected[origin : origin + len(suffix)]) == suffix[: len(expected) - origin]
        for origin in range(start)
    )


def _says_the_same(stream: Streamed, other: Streamed) -> bool:
    return (stream.tokens, stream.text, stream.num_tokens, stream.finish_reason) == (
        other.tokens,
        other.text,
        other.num_tokens,
        other.finish_reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Time for which the streams of a pipeline were silent, from the fault on.

    Both are infinite where every stream broke off there.
    """

    fault: InjectedFault
    first_s: float
    """Seconds until the first of them had a token again."""
    last_s: float
    """Seconds until the last of them had a token again."""


def recovery_of(fault: InjectedFault, streams: Sequence[Streamed]) -> Recovery | None:
    """Returns None where no stream was open, or every open one had had its last token."""
    pauses = fault_named(fault.kind).pauses_streams
    affected = [stream for stream in streams if stream.name in fault.streams]
    silences = [
        silence for stream in affected if (silence := silence_after(fault, stream)) is not None
    ]
    if pauses and not silences and any(_broke_off(s, fault) for s in affected):
        silences = [math.inf]
    if not pauses or not silences:
        return None
    return Recovery(fault=fault, first_s=min(silences), last_s=max(silences))


def _broke_off(stream: Streamed, fault: InjectedFault) -> bool:
    return not stream.is_complete and stream.ended_s > fault.injected_s


def silence_after(fault: InjectedFault, stream: Streamed) -> float | None:
    """Seconds from a fault to the token that ends the longest silence around it.

    A silence belongs to the fault when it began at most `_SETTLE_S` after the fault had landed:
    tokens sent before it still arrive and prove nothing.
    """
    times = (stream.start_s, *stream.arrivals_s)
    around = [
        (after - before, after - fault.injected_s)
        for before, after in pairwise(times)
        if after > fault.injected_s and before <= fault.landed_s + _SETTLE_S
    ]
    return max(around)[1] if around else None


def _is_alone(
    recovery: Recovery, others: Sequence[Recovery], faults: Sequence[InjectedFault]
) -> bool:
    """Returns whether none of its streams waited for the end of another fault, or for the front, at
    the same time."""
    start, end = recovery.fault.injected_s, recovery.fault.injected_s + recovery.last_s
    if any(
        fault_named(fault.kind).breaks_connections
        and start - _FRONT_IS_BACK_S < fault.injected_s < end
        for fault in faults
    ):
        return False
    return not any(
        other.fault.number != recovery.fault.number
        and other.fault.streams & recovery.fault.streams
        and other.fault.injected_s < end
        and start < other.fault.injected_s + other.last_s
        for other in others
    )


def _percentile(values: Sequence[float], share: float) -> float | None:
    return round(percentile(values, share), 3) if values else None


def complaints(report: Mapping[str, object]) -> list[str]:
    """Returns why this run proves nothing or failed; empty when every stream survived faults."""
    reasons = [f"{report[fate]} streams {fate}" for fate in _BAD_FATES if report[fate]]
    if not report["kills"]:
        reasons.append("nothing was broken: give it longer streams, or more of them")
    if report["ended_early"]:
        reasons.append("the schedule ended early, since the service was not ready again in time")
    if report["unnoticed"]:
        reasons.append(f"the service did not notice faults {report['unnoticed']}")
    return reasons


def summarise(
    undisturbed: Sequence[Streamed],
    disturbed: Sequence[Streamed],
    faults: Sequence[InjectedFault],
    noticed: Mapping[int, Noticed] = MappingProxyType({}),
) -> dict[str, object]:
    """The figures; `recovery_*` are over faults, of the slowest stream that each one hit. `noticed`
    is by the faults' numbers."""
    fates = [
        fate_of(expected, actual) for expected, actual in zip(undisturbed, disturbed, strict=True)
    ]
    counts = Counter(fates)
    recoveries = [r for fault in faults if (r := recovery_of(fault, disturbed)) is not None]
    last = [recovery.last_s for recovery in recoveries]
    isolated = [r for r in recoveries if _is_alone(r, recoveries, faults)]
    first = [recovery.first_s for recovery in recoveries]
    hits = Counter(
        name for fault in faults if fault_named(fault.kind).pauses_streams for name in fault.streams
    )
    return {
        "requests": len(disturbed),
        "kills": len(faults),
        "lost": counts["lost"],
        "repeated": counts["repeated"],
        "changed": counts["changed"],
        "resumed": sum(stream.num_resumed > 0 for stream in disturbed),
        "resumptions": sum(stream.num_resumed for stream in disturbed),
        "turned_away": sum(stream.num_turned_away for stream in disturbed),
        "recovery_p50_s": _percentile(last, 0.50),
        "recovery_p95_s": _percentile(last, 0.95),
        "first_stream_p50_s": _percentile(first, 0.50),
        "first_stream_p95_s": _percentile(first, 0.95),
        "alone_kills": len(isolated),
        "alone_p50_s": _percentile([r.last_s for r in isolated], 0.50),
        "alone_p95_s": _percentile([r.last_s for r in isolated], 0.95),
        "recovery_by_kind": _by_kind(faults, recoveries, isolated, noticed),
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
                "request": actual.name,
                "fate": fate,
                "tokens_expected": len(expected.tokens),
                "tokens": len(actual.tokens),
                "same_until": same_until(expected.tokens, actual.tokens),
                "missing_there": _num_missing(expected.tokens, actual.tokens),
                "finish_reason": actual.finish_reason,
                "error": actual.error,
            }
            for expected, actual, fate in zip(undisturbed, disturbed, fates, strict=True)
            if fate != "same"
        ],
    }


def rows_of(
    faults: Sequence[InjectedFault],
    streams: Sequence[Streamed],
    noticed: Mapping[int, Noticed] = MappingProxyType({}),
) -> list[dict[str, object]]:
    """Every fault and what it cost, in order; seconds since the first request."""
    began_s = min((stream.start_s for stream in streams), default=0.0)
    return [
        {
            "number": fault.number,
            "at_s": round(fault.injected_s - began_s, 3),
            "landed_after_s": round(fault.landed_s - fault.injected_s, 3),
            "kind": fault.kind,
            "victim": fault.victim,
            "pipeline": fault.pipeline,
            "when_ready": fault.when_ready,
            "streams": len(fault.streams),
            "noticed_s": None if seen is None else round(seen.after_s, 3),
            "noticed_as": None if seen is None else seen.trouble,
            "first_stream_s": None if recovery is None else round(recovery.first_s, 3),
            "recovery_s": None if recovery is None else round(recovery.last_s, 3),
        }
        for fault in faults
        for recovery in (recovery_of(fault, streams),)
        for seen in (noticed.get(fault.number),)
    ]


def pace_of(streams: Sequence[Streamed]) -> dict[str, float]:
    if not streams:
        return {}
    wall_s = max(s.ended_s for s in streams) - min(s.start_s for s in streams)
    return {
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(len(streams) / wall_s, 3),
        "tokens_per_s": round(sum(len(s.tokens) for s in streams) / wall_s, 1),
    }


def _by_kind(
    faults: Sequence[InjectedFault],
    recoveries: Sequence[Recovery],
    isolated: Sequence[Recovery],
    noticed: Mapping[int, Noticed],
) -> dict[str, object]:
    by_kind: dict[str, object] = {}
    for kind, num in sorted(Counter(fault.kind for fault in faults).items()):
        ours = [r.last_s for r in recoveries if r.fault.kind == kind]
        apart = [r.last_s for r in isolated if r.fault.kind == kind]
        seen = [noticed[f.number].after_s for f in faults if f.kind == kind and f.number in noticed]
        by_kind[kind] = {
            "kills": num,
            "noticed_p50_s": _percentile(seen, 0.50),
            "noticed_max_s": _percentile(seen, 1.0),
            "p50_s": _percentile(ours, 0.50),
            "p95_s": _percentile(ours, 0.95),
            "max_s": _percentile(ours, 1.0),
            "alone_kills": len(apart),
            "alone_p50_s": _percentile(apart, 0.50),
            "alone_p95_s": _percentile(apart, 0.95),
        }
    return by_kind


def _longest_pause(streams: Sequence[Streamed]) -> float:
    return round(max((stream.longest_pause_s for stream in streams), default=0.0), 3)


def table(report: Mapping[str, object]) -> str:
    """Returns the figures as text."""
    by_kind = report["recovery_by_kind"]
    assert isinstance(by_kind, Mapping)
    lines = [
        f"{report['requests']} requests, {report['kills']} kills: {report['lost']} lost, "
        f"{report['repeated']} repeated, {report['changed']} changed",
        f"{report['resumed']} requests resumed by their client, {report['resumptions']} times, "
        f"{report['turned_away']} answers of a front that was being replaced",
        f"from kill to the last stream's next token: p50 {_s(report['recovery_p50_s'])}, "
        f"p95 {_s(report['recovery_p95_s'])}; longest pause {_s(report['longest_pause_s'])}",
        f"{report['alone_kills']} kills with no other one before their end: "
        f"p50 {_s(report['alone_p50_s'])}, p95 {_s(report['alone_p95_s'])}",
        f"{report['interrupted_requests']} requests interrupted {report['interruptions']} times, "
        f"one of them {report['most_interruptions_of_one']} times",
        f"interruptions before the first kill: {report['interruptions_undisturbed']}; "
        f"faults that were not noticed: {report['unnoticed'] or 'none'}",
        *(f"missed: {missed}" for missed in _texts(report["missed"])),
        *(f"left out: {left_out}" for left_out in _texts(report["left_out"])),
        *(f"failed: {complaint}" for complaint in complaints(report)),
        "",
        f"{'kind':27} {'times':>5} {'noticed':>8} {'at most':>8} {'p50':>8} {'p95':>8} "
        f"{'longest':>8} {'alone':>6} {'p50':>8} {'p95':>8}",
    ]
    for kind, row in by_kind.items():
        lines.append(
            f"{kind:27} {row['kills']:5} {_s(row['noticed_p50_s']):>8} "
            f"{_s(row['noticed_max_s']):>8} {_s(row['p50_s']):>8} {_s(row['p95_s']):>8} "
            f"{_s(row['max_s']):>8} {row['alone_kills']:6} {_s(row['alone_p50_s']):>8} "
            f"{_s(row['alone_p95_s']):>8}"
        )
    return "\n".join(lines)


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(text) for text in value]


def _s(value: object) -> str:
    if value == math.inf:
        return "never"
    return f"{value:.1f} s" if isinstance(value, float) else "-"
