"""Draws troubles of running requests and engines."""

from collections.abc import Sequence
from random import Random
from typing import Literal

from eesd_dist.bench.fuzz.cases import (
    Abort,
    Entry,
    Fault,
    Loss,
    Migration,
    Resume,
    Trouble,
    World,
)
from eesd_dist.workers.messages import StageName

_AFTER = (1, 2, 3, 5, 8, 13, 20, 30)
"""Turns between a request's arrival and its trouble."""
_KINDS = ("abort", "resume", "resume", "loss", "migration", "migration")


def draw_troubles(
    rng: Random,
    entries: Sequence[Entry],
    *,
    num_engines: int,
    processes_of: World | None = None,
) -> tuple[Trouble, ...]:
    """Draws no trouble for a fifth of the engines, up to eight for the others. `processes_of`: the
    world with ranks in processes; each loss is the fault of one."""
    if rng.random() < 0.2:
        return ()
    drawn: list[Trouble] = []
    spare = list(entries)
    kinds = _KINDS if processes_of is None else (*_KINDS, *["loss"] * 4)
    for _ in range(rng.randint(1, 8)):
        entry = rng.choice(entries)
        turn = entry.turn + rng.choice(_AFTER)
        match rng.choice(kinds):
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
            case "loss" if processes_of is not None:
                engine = rng.randrange(num_engines)
                drawn.append(_fault(rng, processes_of, turn=turn, engine=engine))
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


def _fault(rng: Random, world: World, *, turn: int, engine: int) -> Fault:
    kinds: tuple[Literal["kill", "stop", "cut"], ...] = ("kill", "kill", "stop", "cut")
    kind = rng.choice(kinds)
    slots: list[tuple[StageName, int]] = [("draft", rank) for rank in range(world.draft_ranks)]
    slots += [("verify", rank) for rank in range(world.verify_ranks)]
    stage, rank = rng.choice(slots[1:] if kind == "stop" else slots)
    return Fault(
        kind=kind,
        turn=turn,
        engine=engine,
        stage=stage,
        rank=rank,
        after=rng.choice((0, 1, 2, 5, 9)),
        delay_s=rng.choice((0.0, 0.0005, 0.002, 0.005, 0.02)),
        is_replaced=rng.random() < 0.5,
    )


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
