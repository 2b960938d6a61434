"""All times of a pipeline's supervision, in one object that checks their order at start-up."""

from dataclasses import dataclass

from eesd_dist.errors import ConfigError
from serve_app.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds. Each wait is shorter than the one that contains it."""

    deadline_s: float
    """Without an answer or progress for so long, a worker is lost."""
    load_s: float
    """Longest start of an epoch, with new processes and weights."""
    lease_s: float
    """How long workers wait for a new supervisor."""
    beat_s: float = 0.5
    """Interval of heartbeats."""
    stall_s: float = 3.0
    """With a worker that has made no progress for so long, a pipeline gets no new requests."""
    grace_s: float = 0.3
    """A killed rank's peers notice a moment before Ray reports which process died."""
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
        self._require("beat_s", "deadline_s")
        self._require("beat_s", "stall_s")
        self._require("grace_s", "deadline_s")
        self._require("deadline_s", "lease_s")
        self._require("deadline_s", "load_s")
        self._require("ping_s", "leave_s")
        self._require("leave_s", "lease_s")
        self._require("retry_s", "max_retry_s")

    def _require(self, shorter: str, longer: str) -> None:
        if getattr(self, shorter) >= getattr(self, longer):
            raise ConfigError(
                f"found {_told(shorter)} {getattr(self, shorter):g} and {_told(longer)} "
                f"{getattr(self, longer):g}, expected the first to be shorter"
            )


def timings_of(config: ServiceConfig) -> Timings:
    """Raises ConfigError for times in the wrong order."""
    recovery = config.recovery
    return Timings(
        deadline_s=config.engine.parallel.timeout_s,
        load_s=recovery.load_timeout_s,
        lease_s=recovery.lease_s,
    )


def _told(name: str) -> str:
    keys = {
        "deadline_s": "engine.parallel.timeout_s",
        "load_s": "recovery.load_timeout_s",
        "lease_s": "recovery.lease_s",
    }
    return keys.get(name, name)
