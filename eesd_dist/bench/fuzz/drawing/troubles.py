"""Draws troubles of running requests and engines."""

from collections.abc import Sequence
from random import Random

from eesd_dist.bench.fuzz.cases import Abort, Entry, Loss, Migration, Resume, Trouble

_AFTER = (1, 2, 3, 5, 8, 13, 20, 30)
"""Turns between a request's arrival and its trouble."""


def draw_troubles(
    rng: Random, entries: Sequence[Entry], *, num_engines: int
) -> tuple[Trouble, ...]:
    """Draws no trouble for a fifth of the engines, up to eight for the others."""
    if rng.random() < 0.2:
        return ()
    drawn: list[Trouble] = []
    spare = list(entries)
    for _ in range(rng.randint(1, 8)):
        entry = rng.choice(entries)
        turn = entry.turn + rng.choice(_AFTER)
        match rng.choice(("abort", "resume", "resume", "loss", "migration", "migration")):
            case "abort":
                spare = [other for other in spare if other != entry]
                has_successor = len(spare) > 1 and rng.random() < 0.5
                successor = spare.pop(rng.randrange(len(spare))).name if has_successor else None
                drawn.append(Abort(turn=turn, entry=entry.name, successor=successor))
            case "resume":
                drawn.append(
                    Resume(
                        turn=turn,
                        entry=entry.name,
                        engine=rng.randrange(num_engines),
                        renamed=rng.random() < 0.4,
                    )
                )
            case "loss":
                drawn.append(
                    Loss(
                        turn=turn,
                        engine=rng.randrange(num_engines),
                        part=rng.choice(("send", "receive", "verify rank", "draft rank")),
                        after=rng.choice((0, 1, 2, 5, 9)),
                        fresh=rng.random() < 0.4,
                    )
                )
            case _ if num_engines > 1:
                drawn.append(_migration(rng, entries, entry, turn=turn))
            case _:  # no engine to migrate to
                pass
    return tuple(drawn)


def _migration(rng: Random, entries: Sequence[Entry], entry: Entry, *, turn: int) -> Migration:
    others = [other.name for other in entries if other.engine == entry.engine]
    names = {entry.name, *rng.sample(others, rng.randint(0, min(2, len(others))))}
    return Migration(
        turn=turn,
        source=entry.engine,
        entries=tuple(sorted(names)) if rng.random() < 0.85 else (),
        copy_after=rng.choice((0, 0, 1, 3)),
        adopt_after=rng.choice((0, 0, 1, 3)),
        chunk_bytes=rng.choice((700, 5000, 1 << 20)),
        is_adopted=rng.random() < 0.85,
    )
