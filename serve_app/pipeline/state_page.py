"""The state of a pipeline as Prometheus text."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


def state_page(
    *,
    is_ready: bool,
    num_interruptions: int,
    recovery_s: float | None,
    is_degraded: bool | None,
    degraded_s: float,
) -> bytes:
    """Returns the page. `recovery_s` None: nothing has interrupted it; `is_degraded` None: it has
    no fallbacks."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, value: float) -> None:
        Gauge(f"eesd_{name}", text, registry=registry).set(value)

    def counter(name: str, text: str, value: float) -> None:
        Counter(f"eesd_{name}", text, registry=registry).inc(value)

    gauge("pipeline_ready", "Whether it can produce tokens now.", is_ready)
    counter(
        "pipeline_interruptions",
        "Times that a worker failed and a new epoch began.",
        num_interruptions,
    )
    if recovery_s is not None:
        gauge(
            "pipeline_recovery_seconds",
            "From the latest interruption to a ready pipeline.",
            recovery_s,
        )
    if is_degraded is not None:
        gauge(
            "degraded",
            "Whether fallbacks take the draft stage's part: plain decoding.",
            is_degraded,
        )
        counter("degraded_seconds", "Seconds in that mode.", degraded_s)
    return generate_latest(registry)
