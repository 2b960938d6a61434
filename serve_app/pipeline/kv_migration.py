"""Migrates live requests to another pipeline, with their KV pages where that helps.

Streams leave one after the other, those with most to recompute first. The pages of a stream are
copied in parts while it goes on; a part can be found in the target as soon as it is there. Then the
stream is told to leave, and the little that was not copied is recomputed. Every actor of the source
copies to its peer rank in the target, over one link for all streams; this module only tells them
when. A failure costs a copy and never a stream: it migrates anyway, and is recomputed from its
tokens. Which requests migrate, and where to, is decided in `drain`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray

from eesd_dist.errors import PROCESS_DIED, EesdError, EngineError, Migrated, PeerLost
from eesd_dist.routing.directory import PipelineReport
from eesd_dist.schedule.page_leases import (
    Backend,
    KvLayout,
    PageLease,
    PageReservation,
    PageTraffic,
)
from eesd_dist.types import RequestId
from eesd_dist.workers.messages import Meeting, PageLink, PagePart
from eesd_dist.workers.process import PROCESS_LOST

logger = logging.getLogger(__name__)

How = Literal["pages", "recompute"]
End = Literal[0, 1]
"""Sender, receiver."""

_FIRST_PAGES = 8
"""Pages of the first part; later ones grow and shrink with the speed of the link."""
_MARGIN_S = 2.0
"""A rank's own deadline comes first, since it knows what it was waiting for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contacts:
    """The actors of one pipeline, by rank name, the drafting actor first."""

    pipeline: str
    ranks: Mapping[str, Any]

    @property
    def drafter(self) -> tuple[str, Any]:
        return next(iter(self.ranks.items()))


@dataclass(slots=True, kw_only=True)
class StreamMove:
    """Record of what was copied of one stream."""

    request_id: RequestId
    num_pages: int = 0
    """Copied pages; every rank has its part of each."""
    num_present: int = 0
    """Pages that the target had already."""
    num_skipped: int = 0
    """Pages for which the target had no room."""
    num_bytes: int = 0
    """Sum over all ranks."""
    reason: str = ""
    """Reason why its pages were not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """Result of a KV migration."""

    by: str
    to: str
    num_requests: int
    """Streams that were told to leave."""
    streams: tuple[StreamMove, ...]
    """The running ones, in the order of the copy."""
    seconds: float
    reason: str
    """Reason why no pages, or not all, were copied."""

    @property
    def num_pages(self) -> int:
        return sum(move.num_pages for move in self.streams)

    @property
    def num_present(self) -> int:
        return sum(move.num_present for move in self.streams)

    @property
    def num_bytes(self) -> int:
        return sum(move.num_bytes for move in self.streams)

    @property
    def how(self) -> Literal["pages", "recomputed"]:
        return "pages" if self.num_pages or self.num_present else "recomputed"


async def migrate(
    source: Contacts,
    target: Contacts,
    *,
    request_ids: Collection[RequestId] | None = None,
    how: How = "pages",
    timeout_s: float = 20.0,
    budget_s: float | None = None,
    reason: str = "it is being drained",
) -> MigrationReport:
    """Migrates these live requests (None: all) to the target, with their pages if possible.

    `timeout_s` is the deadline of each part and each answer. Copying takes as long as parts get
    there, or `budget_s`; streams that are left then are told to leave and recomputed. Raises
    PeerLost only if the source's drafting actor cannot be told; its streams are lost anyway.
    """
    began_s = time.monotonic()
    moving = _Moving(source, target, timeout_s=timeout_s, reason=reason)
    trouble = "" if how == "pages" else "recovery.kv_migration is recompute"
    try:
        try:
            if how == "pages":
                async with asyncio.timeout(budget_s):
                    await moving.with_pages(request_ids)
        except TimeoutError:
            trouble = f"not everything was copied within {budget_s:g} s"
        except EesdError as error:
            trouble = str(error)
        await moving.tell(request_ids, to=None)  # without pages, the least busy pipeline will do
    finally:
        await moving.close()
    if num_skipped := sum(move.num_skipped for move in moving.moves):
        trouble = trouble or f"no room there for {num_skipped} pages"
    report = MigrationReport(
        by=source.pipeline,
        to=target.pipeline,
        num_requests=moving.num_evicted,
        streams=tuple(moving.moves),
        seconds=time.monotonic() - began_s,
        reason=trouble or next((move.reason for move in moving.moves if move.reason), ""),
    )
    logger.info(
        "migrated: by=%s to=%s requests=%d how=%s pages=%d bytes=%d seconds=%.3f reason=%s",
        report.by, report.to, report.num_requests, report.how, report.num_pages,
        report.num_bytes, report.seconds, report.reason,
    )  # fmt: skip
    return report


class _Moving:
    """A KV migration in progress."""

    def __init__(
        self, source: Contacts, target: Contacts, *, timeout_s: float, reason: str
    ) -> None:
        self.moves: list[StreamMove] = []
        self.num_evicted = 0
        self._source = source
        self._target = target
        self._timeout_s = timeout_s
        self._reason = reason
        self._link = ""
        """Empty before ranks are asked to connect."""
        self._is_cut = False
        self._limit = _FIRST_PAGES
        """Pages of the next part."""

    async def with_pages(self, request_ids: Collection[RequestId] | None) -> None:
        """Migrates the running streams. Raises EesdError when no more pages can be copied."""
        backends = await self._backends()
        if order := await self._order(request_ids):
            await self._connect(backends)
        for request_id in order:
            move = StreamMove(request_id=request_id)
            self.moves.append(move)
            try:
                while await self._copy_part(move):
                    pass
            except EesdError as error:
                move.reason = str(error)
                if self._is_cut or isinstance(error, PeerLost):
                    raise
            finally:
                has_pages = move.num_pages or move.num_present
                await self.tell([request_id], to=self._target.pipeline if has_pages else None)

    async def tell(self, request_ids: Collection[RequestId] | None, *, to: str | None) -> None:
        """Tells these streams (None: all) where to continue."""
        migrated = Migrated(by=self._source.pipeline, to=to, reason=self._reason)
        self.num_evicted += await self._ask(self._source.drafter, "evict", request_ids, migrated)

    async def close(self) -> None:
        """Closes the links that answer; the others close by themselves."""
        if self._link:
            ranks = [*self._source.ranks.items(), *self._target.ranks.items()]
            calls = [_ask(r, "close_link", self._link, timeout_s=_MARGIN_S) for r in ranks]
            await asyncio.gather(*calls, return_exceptions=True)

    async def _backends(self) -> Mapping[str, Backend]:
        """Returns what moves each rank's pages. Each rank's pages depend on its machine, so every
        rank has to agree with its peer rank: raises EngineError if one does not."""
        source_ranks, target_ranks = self._source.ranks, self._target.ranks
        refusal = f"{self._target.pipeline} cannot go on from pages of this pipeline"
        if list(source_ranks) != list(target_ranks):
            raise EngineError(
                f"{refusal}: its ranks are {list(source_ranks)} here and {list(target_ranks)} there"
            )
        ranks = (*source_ranks.items(), *target_ranks.items())
        layouts: list[KvLayout] = await asyncio.gather(*(self._ask(r, "kv_layout") for r in ranks))
        backends: dict[str, Backend] = {}
        for rank_name, source_layout, target_layout in zip(
            source_ranks, layouts, layouts[len(source_ranks) :], strict=False
        ):
            if (difference := source_layout.why_not(target_layout)) is not None:
                raise EngineError(f"{refusal}: {rank_name}: {difference}")
            backends[rank_name] = source_layout.backend_to(target_layout)
        return backends

    async def _order(self, request_ids: Collection[RequestId] | None) -> list[RequestId]:
        """Returns the running requests, those first of which most pages are not in the target."""
        lease = await self._ask(self._source.drafter, "lease_pages", request_ids, self._timeout_s)
        try:
            missing = await self._ask(self._target.drafter, "missing_pages", lease)
        finally:
            await self._give_up(lease, None)
        return sorted(missing, key=lambda request_id: (-missing[request_id], request_id))

    async def _connect(self, backends: Mapping[str, Backend]) -> None:
        meeting: Meeting = await self._ask(self._target.drafter, "meet", self._timeout_s)
        self._link = meeting.number
        source, target = self._source.pipeline, self._target.pipeline

        def link(rank_name: str, end: End) -> PageLink:
            return PageLink(
                meeting=meeting,
                rank_name=rank_name,
                ends=(f"{rank_name} of {source}", f"{rank_name} of {target}"),
                end=end,
                backend=backends[rank_name],
                timeout_s=self._timeout_s,
            )

        whole_s = 2 * self._timeout_s + _MARGIN_S
        await self._on_all_ranks(("open_link", "open_link"), link, timeout_s=whole_s)

    async def _copy_part(self, move: StreamMove) -> bool:
        """Leases pages of the stream that are full now and not in the target, copies some of them,
        and registers them only if nothing failed. Returns whether there are more to copy."""
        source, target, timeout_s = self._source.drafter, self._target.drafter, self._timeout_s
        lease: PageLease = await self._ask(source, "lease_pages", [move.request_id], timeout_s)
        pages: PageReservation | None = None
        try:
            pages = await self._ask(target, "reserve_pages", lease, self._limit, timeout_s)
            num_bytes = await self._travel(pages) if pages.moves else 0
            if not await self._ask(source, "return_pages", lease.number):
                raise EngineError(f"{self._source.pipeline} lost its pages while they were copied")
            if not await self._ask(target, "adopt_pages", pages.number):
                raise EngineError(f"{self._target.pipeline} was interrupted during the copy")
        except (_Unanswered, asyncio.CancelledError):
            # A rank may still be writing: the reservation is left to expire.
            await self._give_up(lease, None)
            raise
        except EesdError:
            await self._give_up(lease, pages)
            raise
        if not move.num_pages:
            move.num_present = pages.num_cached
        move.num_pages += len(pages.moves)
        move.num_bytes += num_bytes
        move.num_skipped = pages.num_rejected
        return pages.num_left > 0 and not pages.num_rejected

    async def _travel(self, reservation: PageReservation) -> int:
        """Every rank sends to its peer rank. Returns the bytes, or raises, when no rank is copying
        any more."""

        def part(_: str, end: End) -> PagePart:
            return PagePart(
                link=self._link,
                number=reservation.number,
                epoch=reservation.epoch,
                pages=tuple(move[end] for move in reservation.moves),
                timeout_s=self._timeout_s,
            )

        began_s = time.monotonic()
        traffic: list[PageTraffic] = await self._on_all_ranks(
            ("send_pages", "receive_pages"), part, timeout_s=self._timeout_s + _MARGIN_S
        )
        share = (time.monotonic() - began_s) / self._timeout_s
        if share < 1 / 8:
            self._limit *= 2
        elif share > 1 / 4:
            self._limit = max(1, self._limit // 2)
        return sum(sender.num_bytes for sender in traffic[::2])

    async def _on_all_ranks(
        self, methods: tuple[str, str], argument: Callable[[str, End], object], *, timeout_s: float
    ) -> list[Any]:
        """Calls each rank of both ends; returns the results, a sender's before its receiver's. A
        link over which a call has failed is not used again."""
        ends: tuple[tuple[End, Contacts], ...] = ((0, self._source), (1, self._target))
        calls = [
            _ask((name, of.ranks[name]), methods[end], argument(name, end), timeout_s=timeout_s)
            for name in self._source.ranks
            for end, of in ends
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        if errors := [result for result in results if isinstance(result, BaseException)]:
            self._is_cut = True
            # The actor of an unanswered call may still be writing.
            raise next((e for e in errors if isinstance(e, _Unanswered)), errors[0])
        return results

    async def _give_up(self, lease: PageLease, pages: PageReservation | None) -> None:
        calls = [self._ask(self._source.drafter, "return_pages", lease.number)]
        if pages is not None:
            calls.append(self._ask(self._target.drafter, "abandon_pages", pages.number))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, EesdError):
                logger.info("not told of a failed KV migration: %s", result)

    async def _ask(self, actor: tuple[str, Any], method: str, *args: object) -> Any:
        return await _ask(actor, method, *args, timeout_s=self._timeout_s)


class _Unanswered(PeerLost):
    """The actor may still be doing what it was asked to do."""


async def _ask(actor: tuple[str, Any], method: str, *args: object, timeout_s: float) -> Any:
    """Calls an actor; raises any failure as an EesdError that names it."""
    rank_name, handle = actor
    try:
        async with asyncio.timeout(timeout_s):
            return await getattr(handle, method).remote(*args)
    except TimeoutError as error:
        raise _Unanswered(
            peer=rank_name, operation=method, reason=f"no answer within {timeout_s:g} s"
        ) from error
    except ray.exceptions.ActorUnavailableError as error:  # only the link may have failed
        raise _Unanswered(peer=rank_name, operation=method, reason=str(error)) from error
    except PROCESS_LOST as error:
        raise PeerLost(peer=rank_name, operation=method, reason=PROCESS_DIED) from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EesdError):
            raise cause from error
        raise EngineError(f"{rank_name} failed during {method}: {cause or error!r}") from error
    except EesdError:
        raise
    except Exception as error:  # no such method, or an argument that cannot be sent
        raise EngineError(f"{rank_name} cannot be asked for {method}: {error!r}") from error


class KvMigration:
    """Migrates a pipeline's live requests when it is drained."""

    def __init__(
        self, *, contacts: Callable[[], Awaitable[Contacts]], how: How, timeout_s: float
    ) -> None:
        """`contacts` returns those of this pipeline."""
        self._contacts = contacts
        self._migrate = partial(migrate, how=how, timeout_s=timeout_s)

    async def __call__(
        self, other: PipelineReport, reason: str, budget_s: float | None
    ) -> MigrationReport:
        """Raises EngineError if the other pipeline or this one's drafting actor does not answer."""
        source = await self._contacts()
        target = Contacts(pipeline=other.pipeline_id, ranks=other.ranks)
        return await self._migrate(source, target, budget_s=budget_s, reason=reason)
