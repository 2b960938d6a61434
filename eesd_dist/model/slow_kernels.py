"""Kernels of this process that failed their self-check, so that slower ones run in their place.

Written by self-checks and read by heartbeats, from any thread. Does not import torch.
"""

_REASONS: dict[str, None] = {}
"""Reasons in the order in which they were noted."""


def note_slow_kernel(reason: str) -> None:
    """Notes what failed; the same reason again changes nothing."""
    _REASONS[reason] = None


def slow_kernels() -> tuple[str, ...]:
    """Returns the reasons so far; empty where every kernel is the preferred one."""
    return tuple(_REASONS)
