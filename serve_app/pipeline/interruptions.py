"""Interruptions of a pipeline: how many, the last one, and the time until it was ready again.

They are shown as Prometheus text, with the pipeline's present state.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from eesd_dist.errors import EesdError, EngineError


class Interruptions:
    """The interruptions of one pipeline."""

    def __init__(self, pipeline: str) -> None:
        self._no_trouble = EngineError(f"pipeline {pipeline} is starting")
        self.trouble: EesdError = self._no_trouble
        """The last interruption; until the first, that the pipeline is starting."""
        self.trouble_unix_s: float | None = None
        """Time at which the last interruption was noticed; None before the first."""
        self.number = 0
        self.num_fruitless = 0
        """Interruptions in a row, with requests and without a token."""
        self.since_s = time.monotonic()
        """Time since which the pipeline has been ready, or unavailable."""
        self.recovery_s: float | None = None
        """Seconds from the last interruption to a ready pipeline; None before the first."""
        self._is_degraded = False
        """True from the start of a degraded epoch to its end."""
        self._earlier_degraded_s = 0.0
        """Seconds of earlier degraded epochs."""

    @property
    def has_trouble(self) -> bool:
        """True once something has failed, be it the first start."""
        return self.trouble is not self._no_trouble

    @property
    def last(self) -> str:
        """Text of the last interruption; empty before the first."""
        return str(self.trouble) if self.number else ""

    @property
    def waited_s(self) -> float:
        """Seconds for which the pipeline has been ready, or unavailable."""
        return time.monotonic() - self.since_s

    @property
    def degraded_s(self) -> float:
        """Seconds of degraded epochs so far."""
        return self._earlier_degraded_s + (self.waited_s if self._is_degraded else 0.0)

    def note(self, trouble: EesdError) -> None:
        self.trouble, self.trouble_unix_s = trouble, time.time()

    def start_waiting(self) -> None:
        """Notes that the pipeline is unavailable from now on."""
        self._earlier_degraded_s = self.degraded_s
        self._is_degraded = False
        self.since_s = time.monotonic()

    def count_fruitless(self, *, had_requests: bool, has_worked: bool) -> None:
        if has_worked:
            self.num_fruitless = 0
        elif had_requests:
            self.num_fruitless += 1

    def end_waiting(self, *, is_degraded: bool) -> None:
        """Notes that the pipeline is ready from now on, in a degraded epoch or in a full one."""
        if self.number:
            self.recovery_s = self.waited_s
        self._is_degraded = is_degraded
        self.since_s = time.monotonic()


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
