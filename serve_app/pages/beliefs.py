"""What the router has learnt about acceptance, as Prometheus text."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest


def belief_page(workloads: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Returns gauges of the pooled belief of each class, from `describe` of the router. The router
    keeps at most 256 classes, so there are no more labels."""
    registry = CollectorRegistry()
    for name, key, text in (
        ("acceptance", "mean", "Expected acceptance of a drafted token."),
        ("weight", "weight", "Judged tokens that it rests on, discounted."),
        ("live_requests", "num_live", "Live requests that use it."),
    ):
        gauge = Gauge(f"eesd_belief_{name}", text, ("workload",), registry=registry)
        for workload, belief in workloads.items():
            gauge.labels(workload).set(belief[key])
    return generate_latest(registry)
