"""Streams of a drafting actor as far as they are made, kept for clients that resume them.

A stream is kept from its first token, while it is live and for its window afterwards. Memory is
bounded: the stream that ended first is forgotten first, then the one that began first. A forgotten
stream is computed again from its prompt, to the same text.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from eesd_dist.types import Emission, Request, RequestId

MAX_TOKENS = 2**18
"""Alternatives in log-probabilities count as tokens; at most 0.1 GB."""
MAX_STREAMS = 4096


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A stream from its first token on."""

    submission: int
    window_s: float
    emissions: list[Emission] = field(default_factory=list)
    size: int = 0
    expires_s: float = float("inf")
    """Infinite while it is live."""


class KeptStreams:
    """The kept streams of one drafting actor."""

    def __init__(
        self,
        *,
        max_tokens: int = MAX_TOKENS,
        max_streams: int = MAX_STREAMS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_streams = max_streams
        self._clock = clock
        self._live: dict[RequestId, _Kept] = {}
        """Live streams in the order in which they began."""
        self._ended: dict[RequestId, _Kept] = {}
        """Ended streams in the order in which they ended."""
        self._size = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def num_tokens(self, request_id: RequestId) -> int | None:
        """Returns how many tokens of a stream are kept; None for a stream that is not."""
        self.expire()
        stream = self._live.get(request_id) or self._ended.get(request_id)
        return None if stream is None else sum(len(e.tokens) for e in stream.emissions)

    def begin(self, request: Request) -> tuple[Emission, ...]:
        """Keeps what this submission will make. If it resumes a kept stream, it goes on after what
        was kept; returns that."""
        self.expire()
        earlier = self._forget(request.request_id)
        if not request.resume_window_s or _lacks_logprobs(request):
            return ()
        replayed: list[Emission] = []
        if request.resumption and not request.generated:
            replayed = [structs.replace(e, submission=request.submission) for e in earlier]
        self._live[request.request_id] = _Kept(
            submission=request.submission, window_s=request.resume_window_s
        )
        self._make_room()
        for emission in replayed or _prior_emissions(request):
            self.add(emission)
        return tuple(replayed)

    def add(self, emission: Emission) -> None:
        stream = self._live.get(emission.request_id)
        if stream is None or stream.submission != emission.submission:
            return
        size = len(emission.tokens) + len(emission.prompt_logprobs)
        size += sum(len(token.top) for token in emission.logprobs + emission.prompt_logprobs)
        stream.emissions.append(emission)
        stream.size += size
        self._size += size
        self._make_room()

    def end(self, request_id: RequestId) -> None:
        """Begins the window in which the client may come back."""
        stream = self._live.pop(request_id, None)
        if stream is not None:
            stream.expires_s = self._clock() + stream.window_s
            self._ended[request_id] = stream

    def expire(self) -> None:
        """Forgets the streams that were kept for their whole window."""
        time_s = self._clock()
        while self._ended:
            first = next(iter(self._ended))
            if self._ended[first].expires_s > time_s:
                return
            self._forget(first)

    def _forget(self, request_id: RequestId) -> list[Emission]:
        """Returns what was kept of it."""
        stream = self._live.pop(request_id, None) or self._ended.pop(request_id, None)
        if stream is None:
            return []
        self._size -= stream.size
        return stream.emissions

    def _make_room(self) -> None:
        while self._size > self._max_tokens or len(self) > self._max_streams:
            self._forget(next(iter(self._ended or self._live)))


def _lacks_logprobs(request: Request) -> bool:
    """Returns True if log-probabilities of tokens of an earlier attempt are wanted; they are not
    known."""
    return bool(request.generated) and request.sampling.top_logprobs is not None


def _prior_emissions(request: Request) -> list[Emission]:
    """Returns the tokens that the request came with."""
    if not request.generated:
        return []
    return [
        Emission(
            request_id=request.request_id,
            tokens=request.generated,
            num_accepted=0,
            submission=request.submission,
        )
    ]
