"""Hours of devices that a batch has used, and what its drafts were worth."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from eesd_dist.types import RoundStats

_MIN_PLAIN_ROUNDS = 2
"""Rounds without drafts of one size that say something about that size."""
_SIZES_PER_OCTAVE = 3


@dataclass(slots=True, kw_only=True)
class _Rounds:
    """Rounds of about one size."""

    number: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, other: "_Rounds") -> None:
        self.number += other.number
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds


@dataclass(slots=True, kw_only=True)
class RoundSample:
    """Tokens and seconds of rounds, by number of requests, of all and of those without drafts.

    The engine's controller decodes plainly now and then, to learn what that costs: those rounds are
    the sample. Rounds that also read prompts are left out.
    """

    rounds: defaultdict[int, _Rounds] = field(default_factory=lambda: defaultdict(_Rounds))
    plain: defaultdict[int, _Rounds] = field(default_factory=lambda: defaultdict(_Rounds))

    def observe(self, rounds: Iterable[RoundStats]) -> None:
        for stats in rounds:
            if stats.num_prefill_rows or not stats.num_requests:
                continue
            size = round(_SIZES_PER_OCTAVE * math.log2(stats.num_requests))
            entry = _Rounds(number=1, num_tokens=stats.num_emitted, seconds=stats.total_s)
            self.rounds[size].add(entry)
            if not stats.num_drafted:
                self.plain[size].add(entry)

    def add(self, other: "RoundSample") -> None:
        for own, others in ((self.rounds, other.rounds), (self.plain, other.plain)):
            for size, rounds in others.items():
                own[size].add(rounds)

    @property
    def speed_up(self) -> float | None:
        """Seconds that the tokens would have taken in plain rounds of the same sizes, per second
        that they took; None without enough plain rounds."""
        seconds = plain_s = 0.0
        for size, plain in self.plain.items():
            if plain.number >= _MIN_PLAIN_ROUNDS and plain.num_tokens:
                rounds = self.rounds[size]
                seconds += rounds.seconds
                plain_s += rounds.num_tokens * plain.seconds / plain.num_tokens
        return plain_s / seconds if seconds else None


@dataclass(slots=True, kw_only=True)
class Usage:
    """Use of devices by the engines of a job, and their sampled rounds."""

    core_s: float = 0.0
    """Seconds of CPU cores that engines had, whether they computed or not."""
    gpu_s: float = 0.0
    rounds: RoundSample = field(default_factory=RoundSample)

    def add(self, other: "Usage") -> None:
        self.core_s += other.core_s
        self.gpu_s += other.gpu_s
        self.rounds.add(other.rounds)
