"""The state of autoscaling, as Prometheus text and as JSON."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from eesd_dist.routing.fleet.departure import FleetState


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
