"""Runs one case: requests arrive, troubles happen, engines step, texts are collected.

A turn is one step of each engine. A trouble has no effect if its request has already ended. Two
engines share this thread, so that a case with inline links repeats exactly.
"""

import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from eesd_dist.bench.fuzz.cases import (
    Abort,
    Case,
    EngineSetup,
    Entry,
    Fault,
    Loss,
    Migration,
    Resume,
    Trouble,
)
from eesd_dist.bench.fuzz.models import ModelShelf
from eesd_dist.bench.fuzz.pipeline import AnyPipeline, Pipeline
from eesd_dist.bench.fuzz.rank_processes import RankProcesses
from eesd_dist.engine.core import StepResult
from eesd_dist.schedule.page_leases import PageLease, PageReservation
from eesd_dist.types import Emission, FinishReason, Request, RequestId, TokenId, TokenLogprobs

_MAX_IDLE_TURNS = 3000
"""Turns without a token after which an engine counts as stuck; more than any prompt needs."""


class _State(Enum):
    WAITING = "waiting"
    LIVE = "live"
    DONE = "done"
    ABORTED = "aborted"


@dataclass(slots=True, kw_only=True)
class Stream:
    """Emissions of one entry so far, in any engine."""

    entry: Entry
    engine: int
    request_id: RequestId
    state: _State = _State.WAITING
    submission: int = 0
    tokens: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def is_over(self) -> bool:
        return self.state in (_State.DONE, _State.ABORTED)

    @property
    def is_whole(self) -> bool:
        """False for a text that was aborted."""
        return self.state is _State.DONE


class BrokenError(Exception):
    """Raised when an engine violates an invariant, which the message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Results of a case."""

    streams: tuple[Stream, ...]
    counts: Counter[str]
    error: str | None
    """The error that ended the case early; None if all texts ended."""


def play(case: Case, shelf: ModelShelf, processes: RankProcesses | None = None) -> Played:
    """Runs a case to its end; returns errors of engines as part of the results."""
    player = _Player(case, shelf, processes)
    error = None
    try:
        player.run()
    except Exception:  # any error is a finding of the fuzz
        error = traceback.format_exc(limit=-6)
    finally:
        player.close()
    return Played(streams=tuple(player.streams.values()), counts=player.counts, error=error)


@dataclass(slots=True, kw_only=True)
class _Moving:
    """A migration in progress."""

    migration: Migration
    lease: PageLease
    reservation: PageReservation | None = None
    """None until pages are reserved."""
    is_copied: bool = False
    next_turn: int


class _Player:
    def __init__(self, case: Case, shelf: ModelShelf, processes: RankProcesses | None) -> None:
        self._case = case
        self.counts: Counter[str] = Counter()
        self.streams = {
            entry.name: Stream(
                entry=entry, engine=entry.engine, request_id=entry.request.request_id
            )
            for entry in case.entries
        }
        self._successors = {
            trouble.successor
            for trouble in case.troubles
            if isinstance(trouble, Abort) and trouble.successor is not None
        }
        self._by_id: dict[tuple[int, RequestId], Stream] = {}
        self._troubles = sorted(case.troubles, key=lambda trouble: trouble.turn)
        self._moving: list[_Moving] = []
        self._num_submissions = 0
        self._turn = 0
        self._shelf = shelf
        self._processes = processes
        self._pipelines: list[AnyPipeline] = []

    def run(self) -> None:
        case = self._case
        folder = self._shelf.folder(case.world.model)
        for setup in case.engines:
            self._pipelines.append(self._pipeline(setup, folder))
        idle_turns = 0
        while not self._is_over():
            self._arrive()
            self._befall()
            self._move_on()
            has_emitted = [self._step(index) for index in range(len(self._pipelines))]
            idle_turns = 0 if any(has_emitted) else idle_turns + 1
            if idle_turns > _MAX_IDLE_TURNS:
                raise BrokenError(f"no token in {idle_turns} turns: {self._unfinished()}")
            self._turn += 1
        self._finish()

    def close(self) -> None:
        """Ends all threads and the work of processes, also those of a failed engine."""
        for pipeline in self._pipelines:
            pipeline.abandon()
            self.counts += pipeline.counts

    def _pipeline(self, setup: EngineSetup, folder: Path) -> AnyPipeline:
        if setup.link.kind != "processes":
            return Pipeline(self._case.world, setup, folder=folder)
        assert self._processes is not None, "this case has ranks in processes"
        # Needs Ray, without which the other links can be tried.
        from eesd_dist.bench.fuzz.linked_pipeline import LinkedPipeline

        return LinkedPipeline(self._case.world, setup, folder=folder, processes=self._processes)

    def _is_over(self) -> bool:
        return (
            all(stream.is_over for stream in self.streams.values())
            and not self._moving
            and not any(pipeline.engine.has_work for pipeline in self._pipelines)
        )

    def _unfinished(self) -> str:
        return ", ".join(name for name, stream in self.streams.items() if not stream.is_over)

    # Arrivals.

    def _arrive(self) -> None:
        for name, stream in self.streams.items():
            is_due = stream.state is _State.WAITING and stream.entry.turn <= self._turn
            if is_due and name not in self._successors:
                self._submit(stream)

    def _submit(self, stream: Stream) -> None:
        self._num_submissions += 1
        stream.submission = self._num_submissions
        stream.state = _State.LIVE
        request: Request = replace(
            stream.entry.request,
            request_id=stream.request_id,
            generated=tuple(stream.tokens),
            submission=stream.submission,
        )
        self._by_id[stream.engine, stream.request_id] = stream
        self._pipelines[stream.engine].engine.add(request)

    # Troubles.

    def _befall(self) -> None:
        while self._troubles and self._troubles[0].turn <= self._turn:
            trouble = self._troubles.pop(0)
            if self._happens(trouble):
                self.counts[f"trouble {trouble.kind}"] += 1
                for pipeline in self._pipelines:
                    pipeline.engine.check()

    def _happens(self, trouble: Trouble) -> bool:
        """Returns whether the trouble had an effect."""
        match trouble:
            case Abort():
                return self._abort(trouble)
            case Resume():
                return self._resume(trouble)
            case Loss() | Fault():
                return self._pipelines[trouble.engine].lose(trouble)
            case Migration():
                return self._lease(trouble)

    def _abort(self, trouble: Abort) -> bool:
        stream = self.streams[trouble.entry]
        was_live = stream.state is _State.LIVE
        if was_live:
            self._withdraw(stream)
            stream.state = _State.ABORTED
        if trouble.successor is not None:
            successor = self.streams[trouble.successor]
            if was_live:  # reuses the id that was just freed, in the same engine
                successor.engine, successor.request_id = stream.engine, stream.request_id
                self.counts["id reused"] += 1
            self._submit(successor)
        return was_live

    def _withdraw(self, stream: Stream) -> None:
        self._pipelines[stream.engine].engine.abort(stream.request_id)
        del self._by_id[stream.engine, stream.request_id]

    def _resume(self, trouble: Resume) -> bool:
        stream = self.streams[trouble.entry]
        if stream.state is not _State.LIVE:
            return False
        engine = min(trouble.engine, len(self._pipelines) - 1)
        self._withdraw(stream)
        if engine != stream.engine:
            self.counts["resumed in the other engine"] += 1
        stream.engine = engine
        if trouble.renamed:
            stream.request_id = RequestId(f"{stream.request_id}+")
        self._submit(stream)
        return True

    # Migrations: lease, copy, and adopt or abandon, each in a separate turn.

    def _lease(self, migration: Migration) -> bool:
        if len(self._pipelines) < 2:
            return False
        source, target = self._ends(migration)
        if not source.fits(target):
            return False
        names = [self.streams[name] for name in migration.entries]
        live = [s for s in names if s.state is _State.LIVE and s.engine == migration.source]
        if migration.entries and not live:
            return False
        lease = source.engine.kv_sharing.lease(
            [s.request_id for s in live] if migration.entries else None
        )
        self._moving.append(
            _Moving(migration=migration, lease=lease, next_turn=self._turn + migration.copy_after)
        )
        return True

    def _move_on(self) -> None:
        for moving in [moving for moving in self._moving if moving.next_turn <= self._turn]:
            if moving.reservation is None:
                self._copy(moving)
                moving.next_turn = self._turn + moving.migration.adopt_after
            else:
                self._moving.remove(moving)
                self._adopt(moving, moving.reservation)

    def _copy(self, moving: _Moving) -> None:
        source, target = self._ends(moving.migration)
        reservation = target.engine.kv_sharing.reserve(moving.lease.requests)
        moving.reservation = reservation
        moving.is_copied = source.copy_pages(
            target, reservation, chunk_bytes=moving.migration.chunk_bytes
        )
        self.counts["migrated pages"] += len(reservation.moves) * moving.is_copied

    def _adopt(self, moving: _Moving, reservation: PageReservation) -> None:
        source, target = self._ends(moving.migration)
        has_held = source.engine.kv_sharing.end_lease(moving.lease.number)
        if has_held and moving.is_copied and moving.migration.is_adopted:
            target.engine.kv_sharing.adopt(reservation.number)
        else:
            target.engine.kv_sharing.abandon(reservation.number)
        for name in moving.migration.entries:
            stream = self.streams[name]
            if stream.state is _State.LIVE and stream.engine == moving.migration.source:
                self._withdraw(stream)
                stream.engine = 1 - moving.migration.source
                self._submit(stream)
                self.counts["migrated requests"] += 1
        for pipeline in (source, target):
            pipeline.engine.check()

    def _ends(self, migration: Migration) -> tuple[AnyPipeline, AnyPipeline]:
        return self._pipelines[migration.source], self._pipelines[1 - migration.source]

    # Turns.

    def _step(self, index: int) -> bool:
        """Runs one step; returns whether a token was emitted."""
        pipeline = self._pipelines[index]
        engine = pipeline.engine
        if not engine.has_work:
            return False
        result = pipeline.step()
        if pipeline.engine is not engine:
            self.counts["lost engines"] += 1
            for stream in [s for (at, _), s in self._by_id.items() if at == index]:
                self._submit(stream)
        self._count(result)
        for emission in result.emissions:
            self._take(index, emission)
        return bool(result.emissions)

    def _take(self, index: int, emission: Emission) -> None:
        stream = self._by_id.get((index, emission.request_id))
        if stream is None or stream.submission != emission.submission:
            raise BrokenError(
                f"tokens of {emission.request_id}, submission {emission.submission}, were emitted "
                "after it was aborted"
            )
        if not stream.tokens:
            self.counts["cached prompt tokens"] += emission.num_cached_prompt_tokens
        stream.tokens += emission.tokens
        stream.logprobs += emission.logprobs
        if emission.finish_reason is not None:
            stream.finish_reason = emission.finish_reason
            stream.state = _State.DONE
            del self._by_id[index, emission.request_id]

    def _count(self, result: StepResult) -> None:
        for stats in result.rounds:
            self.counts["rounds"] += 1
            self.counts["drafted"] += stats.num_drafted
            self.counts["accepted"] += stats.num_accepted
            self.counts["rounds of the second microbatch"] += stats.microbatch == 1
        for outcome in result.outcomes:
            self.counts["trees"] += bool(outcome.branches)

    def _finish(self) -> None:
        for pipeline in self._pipelines:
            pipeline.engine.check()
            load = pipeline.engine.load()
            self.counts["preemptions"] += load.num_preemptions
            if load.free_pages != load.num_pages or load.num_running or load.num_waiting:
                raise BrokenError(f"found {load} at the end: pages or requests have leaked")
            pipeline.close()
