"""One case from its values to what is wrong with it: played, and each text compared."""

from collections import Counter
from dataclasses import dataclass

from eesd_dist.bench.fuzz.cases import Case
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.play import Played, Stream, play
from eesd_dist.bench.fuzz.reference import PlainTexts, difference

ENGINE = "the engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that is not as promised."""

    entry: str
    """Whose text it is, or `ENGINE`."""
    what: str
    num_tokens: int
    """Tokens of the text up to there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    failures: tuple[Failure, ...]
    num_texts: int
    num_tokens: int
    counts: Counter[str]


def check(case: Case, shelf: ModelShelf, plain: PlainTexts) -> Checked:
    """An engine that broke is one failure; texts that ended before that are compared all the same.

    Plain texts come first: what would break there is not the engine's.
    """
    wanted = {entry.name: plain.text(case.world, entry.request) for entry in case.entries}
    played = play(case, shelf)
    failures = [] if played.error is None else [_of_engine(played.error)]
    for stream in played.streams:
        found = difference(stream, wanted[stream.entry.name])
        if found is not None:
            failures.append(
                Failure(entry=stream.entry.name, what=found, num_tokens=len(stream.tokens))
            )
    return Checked(
        failures=tuple(failures),
        num_texts=len(_told(played)),
        num_tokens=sum(len(stream.tokens) for stream in _told(played)),
        counts=played.counts,
    )


def _of_engine(error: str) -> Failure:
    return Failure(entry=ENGINE, what=error, num_tokens=0)


def _told(played: Played) -> list[Stream]:
    return [stream for stream in played.streams if stream.tokens]
