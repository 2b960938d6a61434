"""Plan of a job on Ray; read before Ray is imported."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlan:
    """Place and number of a job's engines."""

    address: str | None = None
    """Ray cluster; None: a Ray of its own on this machine."""
    engines: int | None = None
    """Number of engines; None: as many as there are GPUs, or nodes."""
    concurrency: int = 64
    """Rows in flight in each engine."""
