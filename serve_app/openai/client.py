"""The seam between the HTTP API and engines: they take requests and return tokens.

Implementations reach an engine in this process, or pipelines in other processes; the tests use a
toy.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from eesd_dist.types import Emission, Request, RequestId


class EngineClient(Protocol):
    """Turns requests into emissions."""

    def stream(self, request: Request) -> AsyncIterator[Emission]:
        """Yields the request's emissions; the last one has a finish reason.

        Raises an EesdError: before the first emission when the request is refused, later when the
        engine failed and the stream cannot continue.
        """
        ...

    async def abort(self, request_id: RequestId) -> None:
        """Aborts a request and frees what it holds. An unknown id is no error."""
        ...
