"""The members of one pipeline brought together into epochs, watched, and let go.

An epoch is full, with everyone at a post, or degraded: stand-ins, which live in the verify
ranks' processes, take the draft stage's part while its own processes are replaced.

A crew knows members and epochs. How one comes to a post is `_members`' business; what they
compute, and whose requests they serve, is neither's.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eesd_dist.errors import PROCESS_DIED, ConfigError, EesdError, EngineError, PeerLost
from eesd_dist.workers.messages import ControlReport, Epoch, HeadReport, LoopEnd
from serve_app.pipeline.placement import Post
from serve_app.pipeline.workers import LEAVE_TIMEOUT_S, Member, Members

logger = logging.getLogger(__name__)

_GRACE_S = 0.3
"""A killed rank's peers notice a moment before Ray says who has died."""
_CALL_EVERY_S = 1.0
_BUSY_S = 10.0
"""Least patience with whoever comes: opening libraries may hold up all of a process for seconds."""


class Crew:
    """Everyone is at a post, or the crew says who is not."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._pipeline = members.recruiting.pipeline
        self._parallel = members.recruiting.engine.parallel
        self._as_configured = members.recruiting
        self._draft_posts = tuple(post for post in members.posts if post.stage == "draft")
        self._verify_posts = tuple(post for post in members.posts if post.stage == "verify")
        self._broken: set[str] = set()
        """Posts whose member cannot stay: its loop ended by a bug, and what else that has spoilt
        nobody knows, or it does not answer."""
        self._stand_ins: tuple[Member, ...] = ()
        """Who drafts in a degraded epoch, rank 0 first; nobody in a full one."""
        self._unprepared: set[str] = set()
        """Draft posts filled since the last full epoch, weights still to be loaded."""
        self._has_been_full = False
        self._preparing: set[asyncio.Task[None]] = set()
        """Stand-ins that load, and what is learnt for the day of need."""
        self._cost: tuple[str, Mapping[str, object]] | None = None
        """Node of the last drafting actor, and what its engine measured there."""
        self._epoch = 0
        self._recruited_s = 0.0
        """When the last post was filled, by the clock of `time.monotonic`."""

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def recruited_s(self) -> float:
        return self._recruited_s

    @property
    def drafter(self) -> Member:
        """Who leads the present epoch, or led the last one; raises PeerLost when gone."""
        if not self._stand_ins:
            return self.members.at(self.members.posts[0])
        leader = self._stand_ins[0]
        if self.members.at((leader.host or leader).post) is not leader.host:
            raise PeerLost(peer=leader.post.name, operation="call", reason="its process is gone")
        return leader

    @property
    def is_degraded(self) -> bool:
        """Whether the present epoch, or the last one, has stand-ins."""
        return bool(self._stand_ins)

    @property
    def may_stand_in(self) -> bool:
        """Whether the draft stage is away, or not ready, and all verify ranks are there."""
        is_empty = self.members.is_empty
        return (
            self._parallel.stand_in
            and self._has_been_full
            and not any(is_empty(post) for post in self._verify_posts)
            and any(is_empty(p) or p.name in self._unprepared for p in self._draft_posts)
        )

    @property
    def has_other_head(self) -> bool:
        """Whether recruits get another exit head than the configuration names."""
        return self.members.recruiting is not self._as_configured

    def recruit_with_head(self, folder: str) -> None:
        """From now on recruits draft with this exit head."""
        self.members.recruiting = self._as_configured.with_head(folder)

    async def recruit_as_configured(self) -> None:
        """Everyone who was recruited with another head is sent away."""
        await self.members.send_all_away()
        self._unprepared.clear()
        self.members.recruiting = self._as_configured

    async def load_head(self, folder: str) -> HeadReport:
        """The draft stage takes another exit head, and so will every later one in its place.

        Raises CheckpointError or ConfigError when it does not fit: nothing has changed then.
        """
        followers = [m for m in self.members if m.post.stage == "draft" and m.post.rank is not None]
        asked = [member.ask("load_head", "load_head", folder) for member in followers]
        digests: list[str] = await asyncio.gather(*asked)
        if len(set(digests)) > 1:
            raise ConfigError(
                f"{folder} is not the same exit head on every node of the draft ranks: found "
                f"{' and '.join(sorted({digest[:12] for digest in digests}))}; copy it again"
            )
        report: HeadReport = await self.drafter.ask(
            "load_head", "load_head", folder, digests[0] if digests else None
        )
        self.recruit_with_head(folder)
        return replace(report, pipeline=self._pipeline)

    async def form(self, *, timeout_s: float) -> None:
        """Fills empty posts and brings everyone into a new epoch."""
        self._epoch += 1
        self._stand_ins = ()
        operation = f"start of epoch {self._epoch}"
        keeping = asyncio.ensure_future(self.members.places.keep())
        try:
            async with asyncio.timeout(timeout_s):
                await self._while_all_answer(self._gather(operation))
        except TimeoutError as error:
            raise PeerLost(
                peer=f"pipeline {self._pipeline}",
                operation=operation,
                reason=". ".join(
                    [f"not everyone was there after {timeout_s:g} s", *self.members.places.missing]
                ),
            ) from error
        finally:
            keeping.cancel()
        self._has_been_full = True
        self._unprepared.clear()
        self._prepare_for_deaths()

    async def form_degraded(self, *, timeout_s: float) -> None:
        """Brings the verify ranks and their stand-ins into a new epoch; `may_stand_in` holds.

        Raises what a stand-in raises that cannot load.
        """
        self._epoch += 1
        operation = f"start of epoch {self._epoch} with stand-ins"
        verify = [self.members.at(post) for post in self._verify_posts]
        self._stand_ins = tuple(host.stand_in() for host in verify[: len(self._draft_posts)])
        self._recruited_s = time.monotonic()
        drafter, *followers = self._stand_ins
        try:
            async with asyncio.timeout(timeout_s):
                meeting = self._meet(drafter, [*followers, *verify], operation)
                await self._while_all_answer(meeting)
        except TimeoutError as error:
            raise PeerLost(
                peer=f"pipeline {self._pipeline}",
                operation=operation,
                reason=f"not everyone was there after {timeout_s:g} s",
            ) from error

    async def replace_drafters(self, *, timeout_s: float) -> None:
        """Beside a degraded epoch: fills the draft stage's empty posts, and has weights
        loaded. Ended early, it goes on where it was.

        Raises PeerLost when either takes too long; who does not load is dismissed.
        """
        operation = "return of the draft stage"
        keeping = asyncio.ensure_future(self.members.places.keep())
        try:
            empty = [post for post in self._draft_posts if self.members.is_empty(post)]
            await _all(self._fill_beside(post, operation, timeout_s=timeout_s) for post in empty)
            unprepared = [post for post in self._draft_posts if post.name in self._unprepared]
            await _all(self._prepare(p, operation, timeout_s=timeout_s) for p in unprepared)
        finally:
            keeping.cancel()

    async def _gather(self, operation: str) -> None:
        members = self.members
        self._recruited_s = time.monotonic()
        empty = [post for post in members.posts if members.is_empty(post)]
        await _all(self._fill(post, operation) for post in empty)
        drafter, *ranks = [members.at(post) for post in members.posts]
        await self._meet(drafter, ranks, operation)

    async def _fill(self, post: Post, operation: str) -> None:
        """A draft rank loads at once; a verify rank when the epoch begins."""
        await self.members.fill(post, operation)
        self._recruited_s = time.monotonic()
        if post.stage == "draft":
            self._unprepared.add(post.name)
            member = self.members.at(post)
            await member.ask("prepare", operation, *self._cost_known_to(member))
            self._unprepared.discard(post.name)

    async def _meet(self, drafter: Member, ranks: Sequence[Member], operation: str) -> None:
        store = await drafter.ask("host_store", operation)
        epoch = Epoch(
            number=self._epoch,
            store=store,
            num_verify_ranks=len(self._verify_posts),
            num_draft_ranks=len(self._draft_posts),
            timeout_s=self._parallel.timeout_s,
            shares_gpu=any(0 < p.resources.get("GPU", 0) < 1 for p in self.members.posts),
            stands_in=self.is_degraded,
        )
        await _all(
            [
                self._take_part(drafter, "connect", operation, epoch),
                *[self._take_part(rank, "join", operation, epoch) for rank in ranks],
            ]
        )
        await self._take_part(drafter, "join", operation, epoch)

    async def _take_part(self, member: Member, method: str, operation: str, epoch: Epoch) -> None:
        """Who fails by itself would fail the next epoch too: its place is for another one. A
        stand-in has none, and its host may be in good health."""
        try:
            await member.ask(method, operation, epoch)
        except (PeerLost, ConfigError):
            raise
        except EesdError:
            if member.host is None:
                self._broken.add(member.post.name)
            raise

    async def trouble(self) -> EesdError:
        """Waits until this epoch is broken, and says by whom."""
        ends = {
            member: asyncio.ensure_future(member.ask("ended", f"epoch {self._epoch}"))
            for member in self._engaged
        }
        timeout_s = self._parallel.timeout_s
        silences = {
            m: asyncio.ensure_future(self._silence_of(m, timeout_s=timeout_s))
            for m in self._engaged
        }
        deaths = [member.death for member in self._engaged]
        waiting = {*ends.values(), *silences.values(), *deaths}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not any(member.is_dead for member in self._engaged):
                await asyncio.wait(deaths, timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pending in (*ends.values(), *silences.values()):
                pending.cancel()  # nothing to those that are done
        errors = {m: _result(end) for m, end in ends.items() if end.done()}
        self._broken = {
            m.post.name
            for m, error in errors.items()
            if error is not None and not isinstance(error, PeerLost)
        }
        for member, silence in silences.items():
            if silence.done() and not silence.cancelled() and member not in errors:
                errors[member] = silence.result()
                self._broken.add(member.post.name)
        return self._culprit(errors)

    async def _while_all_answer(self, work: Coroutine[Any, Any, None]) -> None:
        """The work, ended by PeerLost as soon as someone who takes part in it is frozen: loading is
        done in threads, and whoever loads answers calls."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._first_silence())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise watching.result()
            working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _first_silence(self) -> EesdError:
        """Of those at a post, and those who come to one meanwhile."""
        calls: dict[Member, asyncio.Task[EesdError]] = {}
        try:
            while True:
                for member in {m.host or m: None for m in self._engaged if not m.is_dead}:
                    if member not in calls:
                        calls[member] = asyncio.ensure_future(self._silence_while_busy(member))
                await asyncio.sleep(_CALL_EVERY_S)
                for call in calls.values():
                    if call.done():
                        return call.result()
        finally:
            for call in calls.values():
                call.cancel()

    async def _silence_while_busy(self, member: Member) -> EesdError:
        timeout_s = max(self._parallel.timeout_s, _BUSY_S)
        return await self._silence_of(member, timeout_s=timeout_s)

    async def _silence_of(self, member: Member, *, timeout_s: float) -> EesdError:
        """Returns when it has not answered a call by the deadline: frozen, or cut off. Its peers
        cannot always tell: they wait for rounds as long as the link lives."""
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await member.ask("whereabouts", "call")
            except TimeoutError:
                return PeerLost(
                    peer=member.label,
                    operation="call",
                    reason=f"no answer within {timeout_s:g} s",
                    epoch=self._epoch,
                )
            except EngineError as error:  # its death is told elsewhere too
                return error
            await asyncio.sleep(_CALL_EVERY_S)

    async def halt(self) -> None:
        """Lets the last round end, once its streams have come out: whoever is told to leave in the
        middle of one may be waiting for a rank that has left."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self.drafter.ask("halt", "halt")
        except (EngineError, TimeoutError) as error:
            logger.warning("not halted: epoch=%d error=%r", self._epoch, error)

    async def disband(self) -> None:
        """Ends the epoch: survivors leave it, and who cannot is taken for dead."""
        await asyncio.gather(*[self._leave_or_go(member) for member in self._engaged])
        self._broken.clear()

    async def _leave_or_go(self, member: Member) -> None:
        if member.post.name not in self._broken and await member.leaves():
            return
        host = member.host or member
        if host not in self.members:
            return  # sent away with its stand-in, or the other way round
        self._dismiss(host)
        self.members.send_for(host.post, f"start of epoch {self._epoch + 1}")

    async def stop(self) -> None:
        await self.members.send_all_away()
        self.members.places.remove()

    @property
    def _engaged(self) -> tuple[Member, ...]:
        """Who is in the present epoch."""
        if not self._stand_ins:
            return tuple(self.members)
        return (*self._stand_ins, *(m for m in self.members if m.post.stage == "verify"))

    def _dismiss(self, member: Member) -> None:
        self.members.dismiss(member)
        self._unprepared.discard(member.post.name)

    async def _fill_beside(self, post: Post, operation: str, *, timeout_s: float) -> None:
        await self.members.fill_beside(post, operation, timeout_s=timeout_s)
        self._unprepared.add(post.name)

    async def _prepare(self, post: Post, operation: str, *, timeout_s: float) -> None:
        member = self.members.at(post)
        known = self._cost_known_to(member)
        preparing = asyncio.ensure_future(member.ask("prepare", operation, *known))
        silence = asyncio.ensure_future(self._silence_while_busy(member))
        try:
            await asyncio.wait(
                {preparing, silence}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not preparing.done():
                self._dismiss(member)
                raise (
                    silence.result()
                    if silence.done()
                    else PeerLost(
                        peer=member.label,
                        operation=operation,
                        reason=f"its weights are not loaded after {timeout_s:g} s",
                    )
                )
            try:
                preparing.result()
            except (PeerLost, ConfigError):
                raise
            except EesdError:  # it would fail again
                self._dismiss(member)
                raise
        finally:
            preparing.cancel()
            silence.cancel()
        self._unprepared.discard(post.name)

    def _cost_known_to(self, member: Member) -> list[Mapping[str, object]]:
        """What the drafting actor before it has measured on its node; at most one."""
        if member.post.rank is not None or self._cost is None:
            return []
        node_id, cost = self._cost
        return [cost] if node_id == member.whereabouts.node_id else []

    def _prepare_for_deaths(self) -> None:
        """Beside the first rounds: what would otherwise be done while streams wait."""
        preparations = [self._learn_cost(self.drafter)]
        if self._parallel.stand_in:
            verify = [m for m in self.members if m.post.stage == "verify"]
            hosts = verify[: len(self._draft_posts)]
            preparations += [self._prepare_stand_in(host.stand_in()) for host in hosts]
        for preparation in preparations:
            task = asyncio.ensure_future(preparation)
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    async def _prepare_stand_in(self, stand_in: Member) -> None:
        try:
            await stand_in.ask("prepare", "preparation")
        except EesdError as error:  # asked again when it is needed
            logger.warning("not prepared: %s error=%s", stand_in.label, error)

    async def _learn_cost(self, drafter: Member) -> None:
        """For the next one on its node: measuring again would make streams wait."""
        try:
            control: ControlReport = await drafter.ask("control", "preparation")
        except EesdError as error:
            logger.warning("costs not learnt: %s error=%s", drafter.label, error)
        else:
            cost = control.cost
            self._cost = None if cost is None else (drafter.whereabouts.node_id, cost)

    def _culprit(self, ends: dict[Member, EesdError | None]) -> EesdError:
        """The most telling of what is known: a death, then a bug, then a rank's complaint."""
        operation = f"epoch {self._epoch}"
        for member in self._engaged:
            if member.is_dead:
                death = member.death
                reason = PROCESS_DIED if death.cancelled() else death.result()
                return PeerLost(peer=member.label, operation=operation, reason=reason)
        errors = [error for error in ends.values() if error is not None]
        bugs = [error for error in errors if not isinstance(error, PeerLost)]
        of_ranks = [
            error for m, error in ends.items() if error is not None and m.post.rank is not None
        ]
        for candidates in (bugs, of_ranks, errors):
            if candidates:
                return candidates[0]
        return EngineError(f"{operation} of pipeline {self._pipeline} ended by itself")


async def _all(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """At the same time; the first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _result(end: "asyncio.Future[LoopEnd]") -> EesdError | None:
    if end.cancelled():
        return None
    error = end.exception()
    if error is not None:
        return error if isinstance(error, EesdError) else EngineError(repr(error))
    return end.result().error
