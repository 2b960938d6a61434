"""The one retry loop: what an ingress does when a stream breaks.

A request is its prompt, its parameters, its seed and its tokens so far: with these any pipeline
continues its text. A pipeline ends a broken stream with one reason, and the ingress, which has the
request, submits it again until it has waited too long. Only a crash that an engine's own process
reported counts against a request: a process that was killed, a lost node, a cut link or a loop
without progress does not. Pure: it reads a clock that it is given, and waits for nothing.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from msgspec import structs

from eesd_dist.errors import (
    CapacityError,
    EesdError,
    EngineCrashed,
    EngineError,
    Migrated,
    PeerLost,
    PoisonRequest,
)
from eesd_dist.types import Emission, Request, TokenId

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0


class Attempts:
    """The attempts at one request, each from its tokens so far."""

    def __init__(self, request: Request, *, suspect_after: int, clock: Callable[[], float]) -> None:
        """`suspect_after` crashes since its last token, the request runs alone; if the engine
        crashes then, it is refused."""
        self._request = request
        self._suspect_after = suspect_after
        self._clock = clock
        self._num_failures = 0
        """Failures in a row, without a token."""
        self._stuck_since_s: float | None = None
        """Time of the first of them; None with a token since."""
        self._is_resumed = False
        self.num_interruptions = 0
        """Attempts that have failed, those without room aside."""
        self._lost_with: dict[str, bool] = {}
        """The processes that died under attempts since its last token, and whether it was a
        suspect there."""
        self._culprits: set[str] = set()
        """The processes that count already: until an ingress hears of a death, it may choose the
        process again."""
        self._was_suspect = False
        """True if the request ran alone in the last attempt."""
        self.refused: set[str] = set()
        """Pipelines that have sent it on since its last token."""
        self.target: str | None = None
        """The pipeline that expects it, with its KV pages."""
        self.last_error: EesdError | None = None
        """The error that ended the last attempt; None before, and with a token since."""

    @property
    def tokens(self) -> tuple[TokenId, ...]:
        """The prompt and what was generated so far."""
        return self._request.prompt + self._request.generated

    @property
    def cache_salt(self) -> str:
        return self._request.cache_salt

    @property
    def is_new(self) -> bool:
        """True if nothing is lost when it is refused."""
        request = self._request
        return not (request.generated or request.is_continued or self._is_resumed)

    @property
    def stuck_s(self) -> float:
        """Seconds since the first failure in a row."""
        return 0.0 if self._stuck_since_s is None else self._clock() - self._stuck_since_s

    def next(self, submission: int) -> Request:
        """Returns the request for the next attempt."""
        is_suspect = self._request.crashes >= self._suspect_after
        self._was_suspect = is_suspect
        request = replace(self._request, submission=submission, is_suspect=is_suspect)
        if self._request.crashes or self._lost_with:
            # What gathers would be lost with the next process too, and the token before the crash
            # would come nearer by one round only.
            return replace(request, flush_interval_s=0.0)
        return request

    def received(self, emissions: tuple[Emission, ...]) -> tuple[Emission, ...]:
        """Adds emissions to the request; returns them as the client sees them.

        A later attempt counts cached prompt tokens and queue time differently: they are dropped.
        """
        new = tuple(token for emission in emissions for token in emission.tokens)
        if new:
            generated = self._request.generated + new
            self._request = replace(self._request, generated=generated, crashes=0)
            self._num_failures, self._stuck_since_s, self.last_error = 0, None, None
            self.refused.clear()
            self._lost_with.clear()
        if not self._is_resumed:
            return emissions
        return tuple(
            structs.replace(
                e,
                num_cached_prompt_tokens=0,
                queue_s=None,
                num_interruptions=self.num_interruptions,
            )
            for e in emissions
        )

    def failed(self, error: EesdError, *, patience_s: float) -> float:
        """Returns how many seconds to wait before the next attempt; raises what ends the stream."""
        is_new = self.is_new
        if isinstance(error, EngineCrashed):
            self._crashed(error)
        elif isinstance(error, Migrated):
            self.target = error.to
            if error.by:
                self.refused.add(error.by)
        elif not isinstance(error, PeerLost) and (not isinstance(error, CapacityError) or is_new):
            raise error
        self._is_resumed, self.last_error = True, error
        self.num_interruptions += not isinstance(error, CapacityError)
        if isinstance(error, CapacityError):  # the pipeline lives, and has others to serve
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = self._clock()
        if self.stuck_s > patience_s:
            raise EngineError(f"no token within {patience_s:.0f} s, given up: {error}") from error
        self._num_failures += 1
        if isinstance(error, Migrated) and self._num_failures == 1:
            return 0.0
        return min(_FIRST_PAUSE_S * 2.0 ** (self._num_failures - 1), _MAX_PAUSE_S)

    def lost(self, leader: str, *, was_admitted: bool) -> None:
        """Notes the process that died under the last attempt. One that has not taken the request
        may have died before, with others in it."""
        if leader not in self._culprits:
            self._lost_with.setdefault(leader, self._was_suspect and was_admitted)

    def blame(self, crashed: Collection[str]) -> None:
        """Counts a lost attempt if its process, as its pipeline has found out since, died of its
        own fault. Raises PoisonRequest."""
        for leader in self._lost_with.keys() & set(crashed):
            is_attributable = self._lost_with.pop(leader)
            self._culprits.add(leader)
            self._crashed(EngineCrashed(str(self.last_error), was_alone=is_attributable))

    def _crashed(self, error: EngineCrashed) -> None:
        crashes = self._request.crashes + 1
        if error.was_alone and crashes >= self._suspect_after:
            raise PoisonRequest(
                request_id=self._request.request_id, crashes=crashes, reason=str(error)
            ) from error
        self._request = replace(self._request, crashes=crashes)
