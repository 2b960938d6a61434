"""Errors of transfers and collectives, in words for an operator."""

import torch

from eesd_dist.errors import EngineError

OWN_FAILURES = (torch.AcceleratorError, torch.OutOfMemoryError)
"""Errors that torch raises when this process's device fails: a CUDA error, or out of memory. NCCL's
errors (DistBackendError) are usually about a peer and are not among them."""


def own_failure(error: RuntimeError, *, member: str, operation: str) -> EngineError:
    """Returns the EngineError for one of OWN_FAILURES."""
    return EngineError(f"{member} failed on its own device during {operation}: {first_line(error)}")


def reason_of(error: Exception, *, timeout_s: float, waited_s: float) -> str:
    """Returns what happened to a link, in words for an operator."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    what = "connection is gone" if isinstance(error, ConnectionError) else "link failed"
    return f"its {what}, waited {waited_s:.1f} s ({first_line(error)})"


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
