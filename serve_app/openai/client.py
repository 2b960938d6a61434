"""The seam between the HTTP API and whatever generates: tokens go in, tokens come out.

The real ones reach the engine in this process or a pipeline actor on another node; the toy of the
tests makes its tokens up.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from eesd_dist.types import Emission, Request, RequestId


class EngineClient(Protocol):
    """Whoever can turn a request into emissions."""

    def stream(self, request: Request) -> AsyncIterator[Emission]:
        """Ends after the emission that has a finish reason.

        Raises from the project's error tree: before the first emission when the request is
        refused, later when the engine broke and nothing can bring the stream back.
        """
        ...

    async def abort(self, request_id: RequestId) -> None:
        """Nobody listens any more: frees what the request holds. An unknown id is no error."""
        ...
