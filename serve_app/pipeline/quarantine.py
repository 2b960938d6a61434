"""Which request may be what breaks the engine, and how that is found out.

A stream has a crash for every time the engine broke under it since its last token. Streams with
too many are let in one at a time, each alone until its first item: whoever breaks an engine that it
had to itself is refused, and the others are cleared. It decides who may be in the engine; it knows
neither engines nor clocks, and waits for nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass

from eesd_dist.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One interruption of the engine, and what follows for its requests."""

    running: tuple[RequestId, ...]
    """Requests that were running when the engine failed."""
    refused: RequestId | None
    """Who broke it alone, not for the first time."""
    evicts_all: bool
    """Nobody may go on in the engine as if nothing had been: it is to be had alone."""


class Quarantine:
    """The streams of one pipeline, in the engine or waiting outside.

    With `suspect_after` 2, a request that breaks every engine is refused after two of them when it
    is alone, and after three in a crowd: the third is the one it has to itself.
    """

    def __init__(self, *, suspect_after: int = 2, refuse_after: int = 6) -> None:
        """`refuse_after`: so many breaks refuse a request even if no break told of requests."""
        self._suspect_after = suspect_after
        self._refuse_after = refuse_after
        self._crashes: dict[RequestId, int] = {}
        self._attributable: dict[RequestId, int] = {}
        """Of these, the ones that a request can have brought about."""
        self._inside: dict[RequestId, None] = {}
        """In the order of entering; a set would forget it."""
        self._dropped: set[RequestId] = set()
        """Inside by the books, though the engine has dropped them: it has broken, and nobody has
        said so yet."""
        self._untested: set[RequestId] = set()
        """Who is yet to be alone in the engine: whoever comes first."""
        self._on_test: RequestId | None = None

    @property
    def is_calm(self) -> bool:
        """Returns whether no request is under suspicion."""
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
        """A stream, from elsewhere with the crashes it has there. It is outside."""
        self._crashes[request_id] = crashes
        self._attributable[request_id] = attributable

    def remove(self, request_id: RequestId) -> None:
        """The stream has ended, wherever it was."""
        self.release(request_id)
        self._crashes.pop(request_id, None)
        self._attributable.pop(request_id, None)
        self._untested.discard(request_id)

    def may_admit(self, request_id: RequestId) -> bool:
        if request_id in self._inside:  # of an engine that has broken under it
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
        """A token came: nothing is held against the stream. True: it is to come out, for the next
        one to be alone."""
        if request_id not in self._crashes:
            return False
        self._crashes[request_id] = 0
        self._attributable[request_id] = 0
        if self._on_test == request_id:
            self._on_test = None
        return bool(self._untested)

    def release(self, request_id: RequestId) -> None:
        """It is no longer in the engine, and the engine has not broken."""
        self._inside.pop(request_id, None)
        self._dropped.discard(request_id)
        if self._on_test == request_id:
            self._on_test = None

    def release_all(self) -> None:
        """The engine has let go of everyone."""
        for request_id in tuple(self._inside):
            self.release(request_id)

    def mark_dropped(self, request_id: RequestId) -> None:
        """The engine dropped the stream; whether it has broken will be heard."""
        if request_id in self._inside:
            self._dropped.add(request_id)

    def was_dropped(self, request_id: RequestId) -> bool:
        return request_id in self._dropped

    def drop_alone(self, request_id: RequestId) -> int:
        """The engine dropped this stream alone and did not break. Returns its crashes."""
        self.release(request_id)
        self._crashes[request_id] += 1
        return self._crashes[request_id]

    def broke(self, *, keeps_streams: bool, is_attributable: bool = True) -> Interruption:
        """The engine broke. `keeps_streams`: it will go on with those that it had, if it may.
        `is_attributable`: a request can have done it, as by a death or a bug."""
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
        """Who was alone in the engine that broke. A request that only ever freezes engines is
        refused too, though later."""
        if is_attributable and self._attributable[request_id] >= self._suspect_after:
            return True
        return self._crashes[request_id] >= self._refuse_after


class Patience:
    """How often an engine may break under streams before it is given up.

    A token proves that it works, whatever broke it now and then.
    """

    def __init__(self, *, max_failures: int) -> None:
        self._max_failures = max_failures
        self._num_failures = 0

    @property
    def num_failures(self) -> int:
        """In a row."""
        return self._num_failures

    @property
    def is_exhausted(self) -> bool:
        return self._num_failures > self._max_failures

    def failed(self) -> None:
        self._num_failures += 1

    def works(self) -> None:
        self._num_failures = 0
