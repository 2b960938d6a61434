"""Which submitted requests the engine gets: a suspect only alone, all others at once.

A suspect is a request under which engines have crashed. It runs alone until its first token: if the
engine crashes then, the suspect is to blame; if not, it is cleared. Pure: it calls no engine and
waits for nothing.
"""

from collections.abc import Collection

from eesd_dist.types import RequestId


class Admission:
    """The requests of one engine, in it or waiting for it."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, bool] = {}
        """Requests and whether they are suspects, in the order of arrival."""
        self._inside: dict[RequestId, None] = {}
        self._on_test: RequestId | None = None
        """The suspect that is alone in the engine and has no token yet."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_suspects(self) -> int:
        """Suspects that wait or are tested."""
        return sum(self._waiting.values()) + (self._on_test is not None)

    @property
    def inside(self) -> Collection[RequestId]:
        return self._inside.keys()

    @property
    def is_test(self) -> bool:
        """Whether the engine has a suspect that is alone in it."""
        return self._on_test is not None

    def arrive(self, request_id: RequestId, *, is_suspect: bool) -> None:
        self._waiting[request_id] = is_suspect

    def leave(self, request_id: RequestId) -> bool:
        """Forgets a request; returns whether it was in the engine."""
        self._waiting.pop(request_id, None)
        if self._on_test == request_id:
            self._on_test = None
        if request_id not in self._inside:
            return False
        del self._inside[request_id]
        return True

    def delivered(self, request_id: RequestId) -> None:
        """A suspect with a token is cleared."""
        if self._on_test == request_id:
            self._on_test = None

    def to_evict(self) -> tuple[RequestId, ...]:
        """Returns the requests that have to leave the engine before the next suspect can enter."""
        if self._on_test is not None or not any(self._waiting.values()):
            return ()
        return tuple(self._inside)

    def next_suspect(self) -> RequestId | None:
        """Returns the suspect that enters next, once the engine is quiet; None if none waits or
        another request is inside."""
        if self._inside:
            return None
        return next((r for r, is_suspect in self._waiting.items() if is_suspect), None)

    def admit(self) -> tuple[RequestId, ...]:
        """Lets requests into the engine and returns them: the next suspect alone, which requires a
        quiet engine, or all requests if there is no suspect."""
        suspect = self.next_suspect()
        if suspect is not None:
            del self._waiting[suspect]
            self._on_test = suspect
            self._inside[suspect] = None
            return (suspect,)
        if self.num_suspects:
            return ()
        admitted = tuple(self._waiting)
        self._waiting.clear()
        self._inside |= dict.fromkeys(admitted)
        return admitted
