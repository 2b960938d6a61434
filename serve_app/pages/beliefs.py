"""Beliefs of the router about acceptance, as Prometheus text.

Clients name workload classes, any number of them over time, and a time series lives on in
Prometheus after its class is forgotten here. So only the first names get a label of their own, and
one caller names at most half of them.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

MAX_NAMES = 200
MAX_NAMES_OF_A_CALLER = 100
OTHER = "other"
"""Label of all further classes together."""


class FirstNames:
    """The first names of those that were ever noted: they do not change any more when they are
    `limit`."""

    def __init__(
        self, *, limit: int = MAX_NAMES, limit_of_a_caller: int = MAX_NAMES_OF_A_CALLER
    ) -> None:
        self._limit = limit
        self._limit_of_a_caller = limit_of_a_caller
        self._names: dict[str, None] = {}
        self._num_of: Counter[str] = Counter()
        """Names that a caller was the first to use."""

    def note(self, names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Adds names, each with its caller, while there is room; returns all that have been added
        so far."""
        for caller, name in names:
            has_room = len(self._names) < self._limit
            if has_room and name not in self._names and self._has_room(caller):
                self._num_of[caller] += 1
                self._names[name] = None
        return tuple(self._names)

    def _has_room(self, caller: str) -> bool:
        return self._num_of[caller] < self._limit_of_a_caller


def belief_page(workloads: Mapping[str, Mapping[str, Any]], *, labels: Collection[str]) -> bytes:
    """Returns gauges of the pooled belief of each class, from `describe` of the router; those
    that are not in `labels` are added up."""
    grouped: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for workload, belief in workloads.items():
        grouped[workload if workload in labels else OTHER].append(belief)
    registry = CollectorRegistry()
    for name, value_of, text in (
        ("acceptance", _mean, "Expected acceptance of a drafted token."),
        ("weight", _weight, "Judged tokens that it rests on, discounted."),
        ("live_requests", _num_live, "Live requests that use it."),
    ):
        gauge = Gauge(f"eesd_belief_{name}", text, ("workload",), registry=registry)
        for label, beliefs in grouped.items():
            gauge.labels(label).set(value_of(beliefs))
    return generate_latest(registry)


def _mean(beliefs: Collection[Mapping[str, Any]]) -> float:
    """Weighs each class by what is known about it; equally where nothing is."""
    weight = _weight(beliefs)
    if not weight:
        return sum(float(belief["mean"]) for belief in beliefs) / len(beliefs)
    return sum(float(belief["mean"] * belief["weight"]) for belief in beliefs) / weight


def _weight(beliefs: Collection[Mapping[str, Any]]) -> float:
    return sum(float(belief["weight"]) for belief in beliefs)


def _num_live(beliefs: Collection[Mapping[str, Any]]) -> float:
    return sum(float(belief["num_live"]) for belief in beliefs)
