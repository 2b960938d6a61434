"""Errors of transfers and collectives, in words for an operator."""

import torch

from eesd_dist.errors import EngineError

OWN_FAILURES = (torch.AcceleratorError, torch.OutOfMemoryError)
"""Errors that torch raises when this process's device fails: a CUDA error, or out of memory. NCCL's
errors (DistBackendError) are usually about a peer and are not among them."""


def own_failure(error: RuntimeError, *, member: str, operation: str) -> EngineError:
    """Returns the EngineError for one of OWN_FAILURES."""
    return EngineError(f"{member} failed on its own device during {operation}: {first_line(error)}")


_GONE = ("closed by peer", "onnection reset", "roken pipe", "pair closure", "ocket closed")


def reason_of(error: RuntimeError, *, timeout_s: float, waited_s: float) -> str:
    """Returns what happened, in words for an operator, then the first line of Gloo's message."""
    message = first_line(error)
    if "imed out" in message:
        return f"no answer within {timeout_s:g} s"
    if any(sign in message for sign in _GONE):
        return f"its connection is gone, waited {waited_s:.1f} s ({message})"
    return f"its link failed, waited {waited_s:.1f} s ({message})"


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
