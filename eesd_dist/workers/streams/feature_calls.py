"""Calls of an operator that wait for a text and its features.

Such a text has no stream: it is returned as a whole with the call's answer, or the call fails and
its caller asks again. Used in the event loop of the drafting actor.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from eesd_dist.errors import EesdError
from eesd_dist.types import RequestId

if TYPE_CHECKING:
    from eesd_dist.engine.recording.text_features import TextFeatures


class FeatureCalls:
    """The calls that are waiting, by request."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, asyncio.Future[TextFeatures]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self, request_id: RequestId) -> "asyncio.Future[TextFeatures]":
        future: asyncio.Future[TextFeatures] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        return future

    def close(self, request_id: RequestId) -> bool:
        """Forgets a call; returns whether it was still waiting."""
        return self._waiting.pop(request_id, None) is not None

    def deliver(self, texts: "Iterable[TextFeatures]") -> None:
        """Answers calls; texts that no call waits for are dropped."""
        for text in texts:
            future = self._waiting.pop(text.request_id, None)
            if future is not None and not future.done():
                future.set_result(text)

    def fail_all(self, error: EesdError) -> tuple[RequestId, ...]:
        """Ends all calls with an error; returns their requests."""
        ended = tuple(self._waiting)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
        return ended
