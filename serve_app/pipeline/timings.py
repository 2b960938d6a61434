"""All times of a pipeline's supervision, in one object that checks their order at start-up."""

from dataclasses import dataclass

from eesd_dist.errors import ConfigError
from serve_app.config import ServiceConfig

_ORDER = {
    "deadline_s": ("lease_s", "load_s"),
    "worker_heartbeat_s": ("deadline_s", "stall_s"),
    "grace_s": ("deadline_s",),
    "ping_s": ("leave_s",),
    "farewell_s": ("leave_s",),
    "leave_s": ("lease_s",),
    "retry_s": ("max_retry_s",),
}
"""Times, and those that must be longer."""

_KEYS = {
    "deadline_s": "engine.parallel.timeout_s",
    "load_s": "recovery.load_timeout_s",
    "lease_s": "recovery.lease_s",
}
"""Keys of the configuration that set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds. Each wait is shorter than the one that contains it."""

    deadline_s: float
    """Longest time without an answer or progress; after it a worker is lost."""
    load_s: float
    """Longest start of an epoch, with new processes and weights."""
    lease_s: float
    """Time for which workers wait for a new supervisor."""
    worker_heartbeat_s: float = 0.5
    """Interval of a worker's heartbeats to its supervisor."""
    stall_s: float = 3.0
    """Longest time without progress of a worker; after it the pipeline gets no new requests."""
    grace_s: float = 0.3
    """A killed rank's peers notice a moment before Ray reports which process died."""
    peers_s: float = 0.8
    """A rank that waits for a lost one reports it so long after the deadline, at most."""
    farewell_s: float = 1.0
    """Time that a worker without progress has to end its streams, before it is killed."""
    busy_s: float = 10.0
    """Shortest deadline of a starting worker: opening libraries blocks a process for seconds."""
    ping_s: float = 2.0
    """An actor's event loop answers at once, unless it is frozen or cut off."""
    leave_s: float = 8.0
    """A little longer than an actor waits until its loop has ended."""
    spawn_s: float = 15.0
    """First timeout of a new process, doubled for each retry: it may have been sent to a node that
    is cut off, which Ray has not noticed yet."""
    retry_s: float = 0.25
    """Pause before a failed start is repeated, doubled each time."""
    max_retry_s: float = 4.0

    def __post_init__(self) -> None:
        for shorter, longer in [(name, outer) for name in _ORDER for outer in _ORDER[name]]:
            if getattr(self, shorter) >= getattr(self, longer):
                raise ConfigError(
                    f"found {_KEYS.get(shorter, shorter)} {getattr(self, shorter):g} and "
                    f"{_KEYS.get(longer, longer)} {getattr(self, longer):g}, expected the first to "
                    "be shorter"
                )


def timings_of(config: ServiceConfig) -> Timings:
    """Raises ConfigError for times in the wrong order."""
    recovery = config.recovery
    return Timings(
        deadline_s=config.engine.parallel.timeout_s,
        load_s=recovery.load_timeout_s,
        lease_s=recovery.lease_s,
    )
