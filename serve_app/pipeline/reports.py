"""Reports of a pipeline to ingresses and operators, as plain values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from eesd_dist.types import RequestId
from eesd_dist.workers.messages import ControlReport, ProcessInfo
from serve_app.pipeline.agreement import KvCapacity
from serve_app.pipeline.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Health of a pipeline: whether it emits tokens, and if not, why."""

    pipeline: str
    is_healthy: bool
    reason: str
    degraded: str = ""
    """Reason why a healthy pipeline is degraded or slow; empty if it is neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    pipeline: str
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineControl:
    """Basis of the decisions of a pipeline's controllers."""

    pipeline: str
    num_live: int
    control: ControlReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    name: str
    pid: int
    host: str
    node_id: str
    loaded_bytes: int | None
    """Bytes of its share of the checkpoint; None before it has begun to load."""
    load_s: float | None
    read_wait_s: float | None
    """Seconds of these in which packing waited for a piece to be read."""
    peak_memory_bytes: int | None
    """Peak memory of its process until its weights were loaded, mapped files included."""
    slow_kernels: tuple[str, ...] = ()
    """Kernels that failed their self-check there, so that slower ones run."""

    @classmethod
    def of(cls, worker: Worker) -> Self:
        load = worker.status.load
        return cls(
            name=worker.slot.name,
            pid=worker.process_info.pid,
            host=worker.process_info.host,
            node_id=worker.process_info.node_id,
            loaded_bytes=None if load is None else load.bytes_done,
            load_s=None if load is None else load.seconds,
            read_wait_s=None if load is None else load.waited_s,
            peak_memory_bytes=None if load is None else load.peak_memory_bytes,
            slow_kernels=worker.status.slow_kernels,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """A pipeline's state, for operators and the router."""

    pipeline: str
    pid: int
    """Process id of the Serve replica itself."""
    epoch: int
    is_ready: bool
    num_live: int
    num_interruptions: int
    unavailable: str
    """Reason why it is not ready, for how long, and what it waits for; empty if it is ready."""
    last_trouble: str
    """Reason of its last interruption; empty if nothing has interrupted it."""
    recovery_s: float | None
    """Seconds from that to a ready pipeline; None before the first."""
    start_s: float | None
    """Seconds that its longest start took, weights included; None before the first."""
    leader: str
    """Name of the process that takes its requests; empty while there is none."""
    weight: float | None
    """Speed as measured at the start of its epoch; None if it was not measured."""
    draining: str
    """Reason why it takes no more requests; empty if it does."""
    workers: tuple[WorkerReport, ...]
    is_degraded: bool = False
    """Fallbacks in the verify ranks' processes take the draft stage's part."""
    degraded_s: float = 0.0
    """Seconds in degraded mode so far."""
    spares: tuple[WorkerReport, ...] = ()
    """Idle workers that can take the slots of lost ones."""
    kv_cache: KvCapacity | None = None
    """Capacity in KV pages; None before its first epoch."""
    last_trouble_unix_s: float | None = None
    """Time at which `last_trouble` was noticed; None if nothing has interrupted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The pipeline's live requests, and the process of its replica."""

    pipeline: str
    process_info: ProcessInfo
    live: tuple[RequestId, ...]


def slow_kernel_notes(workers: Iterable[Worker]) -> list[str]:
    """Returns a line for each slow kernel of these workers."""
    return [
        f"slow: {worker.slot.name} computes {reason}, which failed its self-check there"
        for worker in workers
        for reason in worker.status.slow_kernels
    ]
