"""Page leases and reservations: pages that another pipeline reads or writes while rounds go on.

A live request's full pages never change: everything still to be computed comes after them. So they
are leased while the request goes on (copy before stop, as in live migration: Llumnix, arXiv
2406.03243). A reservation is the other end: pages without a request into which the leased content
is copied. They become cached pages, findable by their tokens, once all of it has arrived. A leased
page is owned until the lease is returned, and a reserved page until it is adopted or abandoned, so
that no round gets either of them before.

Losing the stores voids both. Returning or adopting a voided one reports that, and the tokens are
recomputed. How bytes travel is decided in other modules.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Literal
from uuid import uuid4

from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.types import PageId, RequestId, TokenId

Backend = Literal["link", "nccl"]

_ANY = TokenId(0)
"""Appended to look up full pages: the allocator never matches the page of the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Properties that must be equal in two pipelines for one to use the other's pages."""

    weights: str
    """Path of the checkpoint, and a digest of samples of its files at loading."""
    head: str
    """Digest of the exit head; empty when nothing is drafted."""
    dtype: str
    kv_dtype: str
    """Type of stored keys and values."""
    numerics: str
    split: int
    """Layers [0, split) are the draft stage's."""
    num_layers: int
    draft_ranks: int
    verify_ranks: int
    page_size: int
    machine: str
    """Hardware properties that select the compute routines, and so decide a key's last bits."""
    finds_prefixes: bool
    """True if prefix caching is on."""
    gpu: str = ""
    """UUID of the GPU that holds the pages; empty on a CPU. Need not be equal."""
    has_nccl: bool = False
    """True if this rank's torch has NCCL. Need not be equal."""

    def why_not(self, other: "KvLayout") -> str | None:
        """Returns a description of the first difference; None when pages can migrate."""
        if not other.finds_prefixes:
            return "cache.prefix_caching is off there"
        for entry in fields(self):
            local, remote = getattr(self, entry.name), getattr(other, entry.name)
            if local != remote and entry.name not in _OWN:
                return f"{entry.name} is {local} here and {remote} there"
        return None

    def backend_to(self, other: "KvLayout") -> Backend:
        """Returns what moves pages to the other rank: NCCL from one GPU to another, otherwise a
        link through host memory. NCCL refuses two ranks on one GPU."""
        between_gpus = "" not in (self.gpu, other.gpu) and self.gpu != other.gpu
        return "nccl" if between_gpus and self.has_nccl and other.has_nccl else "link"


_OWN = ("finds_prefixes", "gpu", "has_nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedPages:
    """The full pages of one request, from its first token on."""

    request_id: RequestId
    tokens: tuple[TokenId, ...]
    """The tokens in the pages."""
    pages: tuple[PageId, ...]
    drafts: bool
    """True if the exit head's pages are filled too."""
    cache_salt: str = field(default="", repr=False)
    """Salt of the request: only requests with the same one find these pages, here and there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLease:
    number: str
    """Globally unique, so that a late call never hits another lease."""
    requests: tuple[LeasedPages, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReservation:
    """The pages into which those of a lease are copied."""

    number: str
    epoch: int
    """The epoch it was made in; ranks in another epoch do not write its pages."""
    moves: tuple[tuple[PageId, PageId], ...]
    """(leased page, page here), without pages that are cached here already."""
    num_cached: int
    """Pages that were cached here already."""
    num_rejected: int
    """Leased pages for which there was no room."""
    num_left: int = 0
    """Leased pages beyond the limit of this reservation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTraffic:
    """The pages of one reservation that a rank sent or received."""

    num_pages: int
    num_bytes: int
    seconds: float
    """Seconds from the first chunk to the last message."""


class PageLeases:
    """The leases and reservations of one allocator. Not thread-safe: callers hold a lock."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._leases: dict[str, list[PageId]] = {}
        self._reservations: dict[str, list[_Table]] = {}

    def lease(self, requests: Sequence[LeasedPages]) -> PageLease:
        """Adds an owner to each page until the lease is returned."""
        number = uuid4().hex
        leased = [page for request in requests for page in request.pages]
        self._pages.retain(leased)
        self._leases[number] = leased
        return PageLease(number=number, requests=tuple(requests))

    def end_lease(self, number: str) -> bool:
        """Releases the pages. Returns whether they held the same content during the whole lease;
        False when the stores were lost."""
        leased = self._leases.pop(number, None)
        if leased is None:
            return False
        self._pages.release(leased)
        return True

    def reserve(
        self,
        requests: Sequence[LeasedPages],
        *,
        salt_of: Callable[[LeasedPages], str],
        num_reserved: int,
        untouchable: Set[int],
        epoch: int = 0,
        limit: int | None = None,
    ) -> PageReservation:
        """Reserves pages for the leased ones that are not cached here, at most `limit` and as far
        as there is room: a shorter prefix is useful too.

        `num_reserved` pages stay free for requests of this pipeline; `untouchable` ones may still
        be read or written by a planned round.
        """
        number = uuid4().hex
        arriving: dict[PageId, PageId] = {}
        tables: list[_Table] = []
        rejected: set[PageId] = set()
        left: set[PageId] = set()
        num_cached = 0
        for request in requests:
            salt = salt_of(request)
            table = self._pages.match_prefix([*request.tokens, _ANY], salt=salt)
            num_cached += len(table)
            shared = _arriving(request.pages[len(table) :], arriving)
            self._pages.retain(shared)
            table += shared
            missing = request.pages[len(table) :]
            num_pages = len(missing) if limit is None else max(0, limit - len(arriving))
            left.update(missing[num_pages:])
            missing = missing[:num_pages]
            fresh = self._fresh(len(missing), num_reserved=num_reserved, untouchable=untouchable)
            arriving.update(zip(missing, fresh, strict=False))
            rejected.update(missing[len(fresh) :])
            tables.append(_Table(tokens=request.tokens, pages=[*table, *fresh], salt=salt))
        self._reservations[number] = tables
        return PageReservation(
            number=number,
            epoch=epoch,
            moves=tuple(arriving.items()),
            num_cached=num_cached,
            num_rejected=len(rejected),
            num_left=len(left),
        )

    def num_missing(
        self, requests: Sequence[LeasedPages], *, salt_of: Callable[[LeasedPages], str]
    ) -> dict[RequestId, int]:
        """Returns for each request how many of its pages are not cached here."""
        missing: dict[RequestId, int] = {}
        for request in requests:
            cached = self._pages.match_prefix([*request.tokens, _ANY], salt=salt_of(request))
            self._pages.release(cached)
            missing[request.request_id] = len(request.pages) - len(cached)
        return missing

    def adopt(self, number: str) -> bool:
        """Makes the pages findable; call when all content has arrived. Returns False when the
        reservation was voided."""
        tables = self._reservations.pop(number, None)
        if tables is None:
            return False
        size = self._pages.page_size
        for table in tables:
            self._pages.register(
                table.tokens,
                table.pages,
                num_computed=len(table.pages) * size,
                salt=table.salt,
            )
        for table in tables:
            self._pages.release(table.pages)
        return True

    def abandon(self, number: str) -> None:
        """Frees the pages without making them findable; call when no rank writes any more."""
        for table in self._reservations.pop(number, ()):
            self._pages.release(table.pages)

    def void(self) -> None:
        """Ends all leases and reservations; call when the stores are lost."""
        for leased in self._leases.values():
            self._pages.release(leased)
        self._leases.clear()
        for number in list(self._reservations):
            self.abandon(number)

    def owned(self) -> Iterator[PageId]:
        """Yields each page as often as it is owned by a lease or reservation."""
        for leased in self._leases.values():
            yield from leased
        for tables in self._reservations.values():
            for table in tables:
                yield from table.pages

    def _fresh(self, count: int, *, num_reserved: int, untouchable: Set[int]) -> list[PageId]:
        """Allocates up to `count` pages that are not untouchable, as far as there is room."""
        count = max(0, min(count, self._pages.num_free - num_reserved))
        pages = self._pages.allocate(count) or []
        self._pages.release([page for page in pages if page in untouchable])
        return [page for page in pages if page not in untouchable]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    tokens: tuple[TokenId, ...]
    pages: list[PageId]
    salt: str


def _arriving(leased: Sequence[PageId], arriving: dict[PageId, PageId]) -> list[PageId]:
    """Returns the pages here of a prefix shared with an earlier request of the same lease."""
    return [arriving[page] for page in takewhile(arriving.__contains__, leased)]
