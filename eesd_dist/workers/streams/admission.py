"""Which submitted requests the engine gets: a suspect only alone, all others at once.

A suspect is a request under which engines have crashed. It runs alone until its first token: if the
engine crashes then, the suspect is to blame; if not, it is cleared. Pure: it calls no engine and
waits for nothing.
"""

from collections.abc import Collection

from eesd_dist.types import RequestId


class Admission:
    """The requests of one engine, in it or waiting for it. At most one is a suspect."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, None] = {}
        """Waiting requests in the order of arrival, without the suspect."""
        self._inside: dict[RequestId, None] = {}
        self._suspect: RequestId | None = None
        """The suspect that waits for a quiet engine, or runs and has no token yet."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_suspect(self) -> bool:
        """True while a suspect waits or is tested: another one has to come again later."""
        return self._suspect is not None

    @property
    def inside(self) -> Collection[RequestId]:
        return self._inside.keys()

    def arrive(self, request_id: RequestId, *, is_suspect: bool) -> None:
        if is_suspect:
            assert self._suspect is None, "there is one already"
            self._suspect = request_id
        else:
            self._waiting[request_id] = None

    def leave(self, request_id: RequestId) -> bool:
        """Forgets a request; returns whether it was in the engine."""
        self._waiting.pop(request_id, None)
        if self._suspect == request_id:
            self._suspect = None
        if request_id not in self._inside:
            return False
        del self._inside[request_id]
        return True

    def delivered(self, request_id: RequestId) -> None:
        """A suspect with a token is cleared."""
        if self._suspect == request_id:
            self._suspect = None

    def to_evict(self) -> tuple[RequestId, ...]:
        """Returns the requests that have to leave the engine before the suspect can enter."""
        if self._suspect is None or self._suspect in self._inside:
            return ()
        return tuple(self._inside)

    @property
    def needs_quiet(self) -> bool:
        """True if the next one to enter is a suspect: no round may be in flight then."""
        return self._suspect is not None and not self._inside

    def admit(self) -> tuple[RequestId, ...]:
        """Lets requests into the engine and returns them: the suspect alone, which requires a quiet
        engine, or all requests if there is no suspect."""
        if self._suspect is not None:
            if self._inside:
                return ()
            self._inside[self._suspect] = None
            return (self._suspect,)
        admitted = tuple(self._waiting)
        self._waiting.clear()
        self._inside |= dict.fromkeys(admitted)
        return admitted
