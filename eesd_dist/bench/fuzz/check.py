"""Checks one case: runs it and compares each text."""

import traceback
from collections import Counter
from dataclasses import dataclass

from eesd_dist.bench.fuzz.cases import Case
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.play import play
from eesd_dist.bench.fuzz.rank_processes import RankProcesses
from eesd_dist.bench.fuzz.reference import PlainTexts, difference
from eesd_dist.errors import ConfigError

ENGINE = "the engine"
PLAIN = "plain decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of a case."""

    entry: str
    """The entry with the wrong text; `ENGINE` or `PLAIN` if one of these failed."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    failures: tuple[Failure, ...]
    num_texts: int
    num_tokens: int
    counts: Counter[str]


def check(
    case: Case, shelf: ModelShelf, plain: PlainTexts, processes: RankProcesses | None = None
) -> Checked:
    """Runs a case. A failed engine is one failure; texts that ended before that are still compared.
    `processes`: for a case with ranks in processes.

    Raises ConfigError if plain decoding cannot build the world.
    """
    try:
        texts = {entry.name: plain.text(case.world, entry.request) for entry in case.entries}
    except ConfigError:
        raise
    except Exception:  # a finding too, although in plain decoding
        broke = Failure(entry=PLAIN, what=traceback.format_exc(limit=-6))
        return Checked(failures=(broke,), num_texts=0, num_tokens=0, counts=Counter())
    played = play(case, shelf, processes)
    failures = [] if played.error is None else [Failure(entry=ENGINE, what=played.error)]
    for stream in played.streams:
        mismatch = difference(stream, texts[stream.entry.name])
        if mismatch is not None:
            failures.append(Failure(entry=stream.entry.name, what=mismatch))
    streams = [stream for stream in played.streams if stream.tokens]
    return Checked(
        failures=tuple(failures),
        num_texts=len(streams),
        num_tokens=sum(len(stream.tokens) for stream in streams),
        counts=played.counts,
    )
