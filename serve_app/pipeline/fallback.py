"""A fallback, as a pipeline reaches it: an actor without a separate process.

It answers the calls of a drafting actor or of a draft rank, through the verify rank that it lives
in. The worker group decides when it is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FallbackHandle:
    """Replaces a Ray actor handle; may be sent to other processes like one."""

    host: Any
    """Handle of the verify rank."""

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("__"):  # lookups by copying and pickling
            raise AttributeError(method)
        return _Method(self.host.fallback, method)


@dataclass(frozen=True, slots=True)
class _Method:
    """A remote method of a fallback."""

    call: Any
    name: str

    @property
    def remote(self) -> Callable[..., Any]:
        return lambda *arguments: self.call.remote(self.name, *arguments)
