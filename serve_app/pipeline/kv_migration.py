"""Migrates live requests to another pipeline, with their KV pages where that helps.

Pages are copied while the streams go on; only then are the streams told to leave, and the little
that was not copied is recomputed. Every actor of the source copies to its peer rank in the target;
this module only tells them when. A failure costs the copy and never the streams: they migrate
anyway, and are recomputed from their tokens. Which requests migrate, and where to, is decided in
`drain`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray

from eesd_dist.errors import PROCESS_DIED, EesdError, EngineError, Migrated, PeerLost
from eesd_dist.routing.directory import PipelineReport
from eesd_dist.schedule.page_leases import KvLayout, PageLease, PageTraffic
from eesd_dist.types import RequestId
from eesd_dist.workers.messages import PageLink, Reservation
from eesd_dist.workers.process import PROCESS_LOST

logger = logging.getLogger(__name__)

How = Literal["pages", "recompute"]

_MAX_PASSES = 3
"""Streams grow while their pages are copied: if they grow much, there is another pass."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """Result of a KV migration."""

    by: str
    to: str
    num_requests: int
    """Streams that were told to continue in the target."""
    num_pages: int
    """Copied pages; every rank has its part of each."""
    num_found: int
    """Pages that the target had already."""
    num_bytes: int
    """Sum over all ranks."""
    copy_s: float
    """Seconds of copying, while the streams went on in the source."""
    seconds: float
    how: Literal["pages", "recomputed"]
    reason: str = ""
    """Why no pages, or not all, were copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    num_pages: int
    num_found: int
    num_refused: int
    num_bytes: int


async def migrate(
    source: Contacts,
    target: Contacts,
    *,
    request_ids: Collection[RequestId] | None = None,
    how: How = "pages",
    timeout_s: float = 20.0,
    reason: str = "it is being drained",
) -> MigrationReport:
    """Migrates these live requests (None: all) to the target, with their pages if possible.

    Raises PeerLost only if the source's drafting actor cannot be told; then its streams are lost
    anyway.
    """
    began_s = time.monotonic()
    copies: list[_Copied] = []
    trouble = "" if how == "pages" else "recovery.kv_migration is recompute"
    if how == "pages":
        try:
            await _copy_all(source, target, request_ids, copies, timeout_s=timeout_s)
        except EesdError as error:
            trouble = str(error)
    copy_s = time.monotonic() - began_s
    to = target.pipeline if copies else None  # without pages, the least busy pipeline will do
    migrated = Migrated(by=source.pipeline, to=to, reason=reason)
    num_requests = await _ask(source.drafter, "evict", request_ids, migrated, timeout_s=timeout_s)
    num_refused = copies[-1].num_refused if copies else 0
    if not trouble and num_refused:
        trouble = f"no room there for {num_refused} pages"
    num_pages = sum(copy.num_pages for copy in copies)
    num_found = max((copy.num_found for copy in copies), default=0)
    report = MigrationReport(
        by=source.pipeline,
        to=target.pipeline,
        num_requests=num_requests,
        num_pages=num_pages,
        num_found=num_found,
        num_bytes=sum(copy.num_bytes for copy in copies),
        copy_s=copy_s,
        seconds=time.monotonic() - began_s,
        how="pages" if num_pages or num_found else "recomputed",
        reason=trouble,
    )
    logger.info(
        "migrated: by=%s to=%s requests=%d how=%s pages=%d bytes=%d seconds=%.3f reason=%s",
        report.by, report.to, report.num_requests, report.how, report.num_pages,
        report.num_bytes, report.seconds, report.reason,
    )  # fmt: skip
    return report


async def _copy_all(
    source: Contacts,
    target: Contacts,
    request_ids: Collection[RequestId] | None,
    copies: list[_Copied],
    *,
    timeout_s: float,
) -> None:
    """Copies until little is left; `copies` has what was copied, also after an error."""
    why_not = await _why_not(source, target, timeout_s=timeout_s)
    if why_not is not None:
        raise EngineError(f"{target.pipeline} cannot go on from pages of this pipeline: {why_not}")
    began_s = time.monotonic()
    for _ in range(_MAX_PASSES):
        num_requests, copied = await _copy(source, target, request_ids, timeout_s=timeout_s)
        copies.append(copied)
        if copied.num_pages <= num_requests or time.monotonic() - began_s > timeout_s:
            return


async def _why_not(source: Contacts, target: Contacts, *, timeout_s: float) -> str | None:
    """Returns why pages cannot be copied. Each rank's pages depend on its machine, so every rank
    has to agree with its peer rank."""
    if list(source.ranks) != list(target.ranks):
        return f"its ranks are {list(source.ranks)} here and {list(target.ranks)} there"
    layouts: list[KvLayout] = await asyncio.gather(
        *(
            _ask(actor, "kv_layout", timeout_s=timeout_s)
            for actor in (*source.ranks.items(), *target.ranks.items())
        )
    )
    count = len(source.ranks)
    for rank_name, mine, theirs in zip(source.ranks, layouts[:count], layouts[count:], strict=True):
        difference = mine.why_not(theirs)
        if difference is not None:
            return f"{rank_name}: {difference}"
    return None


async def _copy(
    source: Contacts,
    target: Contacts,
    request_ids: Collection[RequestId] | None,
    *,
    timeout_s: float,
) -> tuple[int, _Copied]:
    """One pass: leases pages, copies them, and registers them only if nothing failed."""
    lease: PageLease = await _ask(
        source.drafter, "lease_pages", request_ids, timeout_s, timeout_s=timeout_s
    )
    reservation: Reservation | None = None
    try:
        reservation = await _ask(
            target.drafter, "reserve_pages", lease, timeout_s, timeout_s=timeout_s
        )
        traffic = await _travel(source, target, reservation, timeout_s=timeout_s)
        number = reservation.pages.number
        if not await _ask(source.drafter, "return_pages", lease.number, timeout_s=timeout_s):
            raise EngineError(f"{source.pipeline} lost its pages while they were copied")
        if not await _ask(target.drafter, "adopt_pages", number, timeout_s=timeout_s):
            raise EngineError(f"{target.pipeline} was interrupted while pages were copied to it")
    except (_Unanswered, asyncio.CancelledError):
        # A rank may still be writing: the reservation is left to expire.
        await _give_up(source, target, lease, None, timeout_s=timeout_s)
        raise
    except EesdError:
        await _give_up(source, target, lease, reservation, timeout_s=timeout_s)
        raise
    return len(lease.requests), _Copied(
        num_pages=len(reservation.pages.moves),
        num_found=reservation.pages.num_found,
        num_refused=reservation.pages.num_refused,
        num_bytes=sum(each.num_bytes for each in traffic),
    )


async def _travel(
    source: Contacts, target: Contacts, reservation: Reservation, *, timeout_s: float
) -> list[PageTraffic]:
    """Every rank sends to its peer rank. Returns, or raises, when no rank is copying any more."""
    if not reservation.pages.moves:
        return []
    leased, here = zip(*reservation.pages.moves, strict=True)
    calls: list[Awaitable[PageTraffic]] = []
    for rank_name in source.ranks:
        ends = (f"{rank_name} of {source.pipeline}", f"{rank_name} of {target.pipeline}")
        for contacts, method, pages in (
            (source, "send_pages", leased),
            (target, "receive_pages", here),
        ):
            link = PageLink(
                number=reservation.pages.number,
                epoch=reservation.pages.epoch,
                store=reservation.store,
                rank_name=rank_name,
                ends=ends,
                pages=tuple(pages),
                timeout_s=timeout_s,
            )
            whole_s = 2 * timeout_s + _MARGIN_S
            calls.append(
                _ask((rank_name, contacts.ranks[rank_name]), method, link, timeout_s=whole_s)
            )
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if isinstance(error, _Unanswered):  # its actor may still be writing
            raise error
    if errors:
        raise errors[0]
    return [result for result in results[::2] if isinstance(result, PageTraffic)]


class _Unanswered(PeerLost):
    """The actor may still be doing what it was asked to do."""


async def _give_up(
    source: Contacts,
    target: Contacts,
    lease: PageLease,
    reservation: Reservation | None,
    *,
    timeout_s: float,
) -> None:
    calls = [_ask(source.drafter, "return_pages", lease.number, timeout_s=timeout_s)]
    if reservation is not None:
        number = reservation.pages.number
        calls.append(_ask(target.drafter, "abandon_pages", number, timeout_s=timeout_s))
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, EesdError):
            logger.info("not told of a failed KV migration: %s", result)


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
        self._how: How = how
        self._timeout_s = timeout_s

    async def __call__(self, other: PipelineReport, reason: str) -> MigrationReport:
        """Raises EngineError if the other pipeline or this one's drafting actor does not answer."""
        mine = await self._contacts()
        theirs = Contacts(pipeline=other.pipeline_id, ranks=other.ranks)
        return await migrate(mine, theirs, how=self._how, timeout_s=self._timeout_s, reason=reason)
