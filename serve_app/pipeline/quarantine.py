"""Finds the request that crashes the engine.

A stream has a crash for every time the engine broke under it since its last token. Suspects, which
have too many, are admitted one at a time, each alone until its first item: a request that crashes
an engine in which it is alone is refused, and the others are cleared. Quarantine decides which
requests may be admitted; it depends on neither engines nor clocks, and waits for nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass

from eesd_dist.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One interruption of the engine, and its consequences for the requests."""

    running: tuple[RequestId, ...]
    """Requests that were running when the engine failed."""
    refused: RequestId | None
    """Request that crashed the engine alone, and not for the first time."""
    evicts_all: bool
    """Whether all requests leave the engine, since some are to be tested alone."""


class Quarantine:
    """The requests of one pipeline, in the engine or in the admission queue.

    With `suspect_after` 2, a request that crashes every engine is refused after two crashes when it
    runs alone, and after three with others: the third is in the engine that it runs in alone.
    """

    def __init__(self, *, suspect_after: int = 2, refuse_after: int = 6) -> None:
        """`refuse_after`: so many crashes refuse a request even if none is attributable."""
        self._suspect_after = suspect_after
        self._refuse_after = refuse_after
        self._crashes: dict[RequestId, int] = {}
        self._attributable: dict[RequestId, int] = {}
        """Of these, the attributable crashes: those that a request can have caused."""
        self._inside: dict[RequestId, None] = {}
        """Admitted requests in the order of admission; a set would forget it."""
        self._dropped: set[RequestId] = set()
        """Admitted by the books, but dropped by an engine that has broken, which is not reported
        yet."""
        self._untested: set[RequestId] = set()
        """Suspects still to be tested alone, in any order."""
        self._on_test: RequestId | None = None

    @property
    def is_calm(self) -> bool:
        """Returns whether no request is a suspect."""
        return self._on_test is None and not self._untested

    @property
    def inside(self) -> Collection[RequestId]:
        return self._inside.keys()

    @property
    def num_suspects(self) -> int:
        return len(self._untested) + (self._on_test is not None)

    def crashes(self, request_id: RequestId) -> int:
        return self._crashes[request_id]

    def attributable(self, request_id: RequestId) -> int:
        return self._attributable[request_id]

    def is_suspect(self, request_id: RequestId) -> bool:
        return self._crashes[request_id] >= self._suspect_after

    def add(self, request_id: RequestId, *, crashes: int = 0, attributable: int = 0) -> None:
        """Adds a stream to the admission queue, with the crashes it has had in other pipelines."""
        self._crashes[request_id] = crashes
        self._attributable[request_id] = attributable

    def remove(self, request_id: RequestId) -> None:
        """Removes a stream that has ended."""
        self.release(request_id)
        self._crashes.pop(request_id, None)
        self._attributable.pop(request_id, None)
        self._untested.discard(request_id)

    def may_admit(self, request_id: RequestId) -> bool:
        if request_id in self._inside:  # admitted to an engine that has broken since
            return False
        if self.is_calm:
            return True
        return not self._inside and request_id in self._untested

    def admit(self, request_id: RequestId) -> None:
        assert self.may_admit(request_id)
        if request_id in self._untested:
            self._untested.remove(request_id)
            self._on_test = request_id
        self._inside[request_id] = None

    def delivered(self, request_id: RequestId) -> bool:
        """Clears the stream's crashes, since it has a token. Returns whether it has to be evicted,
        so that the next suspect is alone."""
        if request_id not in self._crashes:
            return False
        self._crashes[request_id] = 0
        self._attributable[request_id] = 0
        if self._on_test == request_id:
            self._on_test = None
        return bool(self._untested)

    def release(self, request_id: RequestId) -> None:
        """Takes a request out of the engine, which has not broken."""
        self._inside.pop(request_id, None)
        self._dropped.discard(request_id)
        if self._on_test == request_id:
            self._on_test = None

    def release_all(self) -> None:
        """Takes all requests out of the engine, which has evicted them."""
        for request_id in tuple(self._inside):
            self.release(request_id)

    def mark_dropped(self, request_id: RequestId) -> None:
        """Notes that the engine dropped the stream; whether it has broken is not known yet."""
        if request_id in self._inside:
            self._dropped.add(request_id)

    def was_dropped(self, request_id: RequestId) -> bool:
        return request_id in self._dropped

    def drop_alone(self, request_id: RequestId) -> int:
        """Counts a crash: the engine dropped this stream alone and did not break. Returns its
        crashes."""
        self.release(request_id)
        self._crashes[request_id] += 1
        return self._crashes[request_id]

    def broke(self, *, keeps_streams: bool, is_attributable: bool = True) -> Interruption:
        """Counts a crash of the engine. `keeps_streams`: it can go on with its admitted requests.
        `is_attributable`: a request can have caused it, as with a death or a bug."""
        running = tuple(self._inside)
        for request_id in running:
            self._crashes[request_id] += 1
            self._attributable[request_id] += is_attributable
        suspects = [request_id for request_id in running if self.is_suspect(request_id)]
        is_alone = len(running) == 1
        refused = (
            running[0] if is_alone and self._is_to_refuse(running[0], is_attributable) else None
        )
        self._on_test = None
        self._untested.update(s for s in suspects if s != refused)
        evicts_all = not keeps_streams or bool(suspects) or not self.is_calm
        for request_id in running if evicts_all else tuple(self._dropped):
            del self._inside[request_id]
        self._dropped.clear()
        return Interruption(running=running, refused=refused, evicts_all=evicts_all)

    def _is_to_refuse(self, request_id: RequestId, is_attributable: bool) -> bool:
        """Returns whether to refuse a request that was alone in the engine that broke. A request
        that only ever freezes engines is refused too, though later."""
        if is_attributable and self._attributable[request_id] >= self._suspect_after:
            return True
        return self._crashes[request_id] >= self._refuse_after


class Patience:
    """Counts how often an engine breaks under streams before the pipeline is given up.

    A token proves that it works, and resets the count.
    """

    def __init__(self, *, max_failures: int) -> None:
        self._max_failures = max_failures
        self._num_failures = 0

    @property
    def num_failures(self) -> int:
        """Failures in a row."""
        return self._num_failures

    @property
    def is_exhausted(self) -> bool:
        return self._num_failures > self._max_failures

    def failed(self) -> None:
        self._num_failures += 1

    def works(self) -> None:
        self._num_failures = 0
