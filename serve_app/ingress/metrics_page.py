"""Prometheus pages of an ingress: those of other processes merged into one, the router's beliefs
about acceptance, and the state of autoscaling, which is also described as JSON. Pure.

Clients name workload classes, any number of them over time, and a time series lives on in
Prometheus after its class is forgotten here: classes without a label of their own are added up.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.routing.fleet.departure import FleetState
from serve_app.pipeline.reports import MetricsPage


def merged(pages: Iterable[MetricsPage]) -> bytes:
    """Merges pages of pipelines: every sample gets the label `pipeline`."""
    return joined((page.text, {"pipeline": page.pipeline}) for page in pages)


def joined(pages: Iterable[tuple[bytes, Mapping[str, str]]]) -> bytes:
    """Merges pages, with labels for all samples of each."""
    families: dict[str, Metric] = {}
    for page, more in pages:
        for family in text_string_to_metric_families(page.decode()):
            into = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, **more}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed:
    """Collector of families that are collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def fleet_page(state: FleetState) -> bytes:
    """Returns gauges of the pipelines, and the decisions so far by direction and signal."""
    registry = CollectorRegistry()
    for name, text, value in (
        ("wanted", "Pipelines that autoscaling wants.", state.decision.target),
        ("ready", "Pipelines that take requests.", state.num_ready),
        ("starting", "Pipelines that start, or are not ready.", state.num_starting),
        ("draining", "Pipelines that take no more requests.", state.num_draining),
        ("unserved", "Requests at ingresses for which no pipeline is ready.", state.num_waiting),
    ):
        Gauge(f"eesd_fleet_{name}", text, registry=registry).set(value)
    decisions = Counter(
        "eesd_fleet_decisions",
        "Changes of the wanted number of pipelines.",
        ("direction", "signal"),
        registry=registry,
    )
    for (direction, signal), number in state.num_changes.items():
        decisions.labels(direction, signal).inc(number)
    return generate_latest(registry)


def fleet_as_json(state: FleetState) -> dict[str, object]:
    decision = state.decision
    return {
        "wanted": decision.target,
        "min_count": state.targets.min_count,
        "max_count": state.targets.max_count,
        "signal": decision.signal,
        "reason": decision.reason,
        "since_s": decision.since_s,
        "num_ready": state.num_ready,
        "num_starting": state.num_starting,
        "num_draining": state.num_draining,
        "num_waiting": state.num_waiting,
        "leaving": state.leaving,
    }


OTHER = "other"
"""Label of all further classes together."""


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
