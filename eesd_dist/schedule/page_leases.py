"""Pages that another pipeline reads here, or writes here, while rounds go on.

A live request's full pages never change again: what is left to compute lies behind them. So they
are leased while the request goes on (copying before stopping, as live migration does: Llumnix,
arXiv 2406.03243). A reservation is the other end: pages that are nobody's while foreign bytes
arrive in them and that become cached pages, findable by their tokens, when all of them have come. A
leased page is owned until it is returned and a reservation's page until it is adopted or abandoned,
so that no round gets either of them in between.

Losing the stores voids both: whoever comes back with a voided one is told so, and recomputation is
always right. Refuses to know how bytes travel and who asks.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, fields
from itertools import takewhile
from uuid import uuid4

from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.types import PageId, RequestId, TokenId

_ANY = TokenId(0)
"""The allocator never finds the page of the last token; behind full pages any other may stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What two pipelines must agree in before the one may go on from the other's pages."""

    weights: str
    """Path of the checkpoint, and a digest of samples of its files as they were when loaded."""
    head: str
    """Digest of the exit head; empty: nothing is drafted."""
    dtype: str
    numerics: str
    split: int
    """Layers [0, split) are the draft stage's."""
    num_layers: int
    draft_ranks: int
    verify_ranks: int
    page_size: int
    machine: str
    """What decides which routines compute, and so the last bit of a key."""
    finds_prefixes: bool
    """Whether pages are findable at all."""

    def why_not(self, other: "KvLayout") -> str | None:
        """The first difference in words; None: this pipeline's pages are as good as the other's."""
        if not other.finds_prefixes:
            return "cache.prefix_caching is off there"
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs and each.name != "finds_prefixes":
                return f"{each.name} is {mine} here and {theirs} there"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedPages:
    """The full pages of one request, from its first token on."""

    request_id: RequestId
    tokens: tuple[TokenId, ...]
    """As many as the pages hold."""
    pages: tuple[PageId, ...]
    drafts: bool
    """Whether the exit head's own pages are filled too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLease:
    number: str
    requests: tuple[LeasedPages, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReservation:
    """Where the pages of a lease are to be written."""

    number: str
    epoch: int
    """The membership it was reserved in; of another one, nobody writes into its pages."""
    moves: tuple[tuple[PageId, PageId], ...]
    """(leased page, page here), without those whose tokens are findable here already."""
    num_found: int
    """Pages that were here already."""
    num_refused: int
    """Lent pages that found no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTraffic:
    """What one rank sent or received of a reservation."""

    num_pages: int
    num_bytes: int
    seconds: float
    """From the first chunk to the last word; the joining of the two ranks is not counted."""


class PageLeases:
    """The leases and reservations of one allocator. Its owner's lock is its own."""

    def __init__(
        self, pages: PageAllocator, *, new_number: Callable[[], str] = lambda: uuid4().hex
    ) -> None:
        """`new_number`: a name that no pipeline has ever used, so that nothing late is mistaken."""
        self._pages = pages
        self._new_number = new_number
        self._leases: dict[str, list[PageId]] = {}
        self._reservations: dict[str, list[_Table]] = {}

    def lease(self, requests: Sequence[LeasedPages]) -> PageLease:
        """One owner more for each page until the lease is returned."""
        number = self._new_number()
        leased = [page for request in requests for page in request.pages]
        self._pages.retain(leased)
        self._leases[number] = leased
        return PageLease(number=number, requests=tuple(requests))

    def end_lease(self, number: str) -> bool:
        """Whether the pages held the same all the while; False when the stores were lost."""
        leased = self._leases.pop(number, None)
        if leased is None:
            return False
        self._pages.release(leased)
        return True

    def reserve(
        self,
        requests: Sequence[LeasedPages],
        *,
        salt_of: Callable[[bool], str],
        num_kept: int,
        untouchable: Set[int],
        epoch: int = 0,
    ) -> PageReservation:
        """Pages for what is not here yet, as far as there is room: a shorter prefix is one too.

        `num_kept` pages stay for those who run here; `untouchable` ones may still be read or
        written by a round that was decided on.
        """
        number = self._new_number()
        arriving: dict[PageId, PageId] = {}
        tables: list[_Table] = []
        refused: set[PageId] = set()
        num_found = 0
        for request in requests:
            salt = salt_of(request.drafts)
            table = self._pages.match_prefix([*request.tokens, _ANY], salt=salt)
            num_found += len(table)
            shared = _known(request.pages[len(table) :], arriving)
            self._pages.retain(shared)
            table += shared
            missing = request.pages[len(table) :]
            fresh = self._fresh(
                len(missing),
                after=table[-1] if table else None,
                num_kept=num_kept,
                untouchable=untouchable,
            )
            arriving.update(zip(missing, fresh, strict=False))
            refused.update(missing[len(fresh) :])
            tables.append(_Table(tokens=request.tokens, pages=[*table, *fresh], salt=salt))
        self._reservations[number] = tables
        return PageReservation(
            number=number,
            epoch=epoch,
            moves=tuple(arriving.items()),
            num_found=num_found,
            num_refused=len(refused),
        )

    def adopt(self, number: str) -> bool:
        """All bytes are here: the pages are findable from now on. False when it was voided."""
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
        """Nothing of it is registered; whoever calls this knows that nobody writes any more."""
        for table in self._reservations.pop(number, ()):
            self._pages.release(table.pages)

    def void(self) -> None:
        """The stores are lost: no lease and no reservation is worth anything."""
        for leased in self._leases.values():
            self._pages.release(leased)
        self._leases.clear()
        for number in list(self._reservations):
            self.abandon(number)

    def owned(self) -> Iterator[PageId]:
        """Each page as often as it is owned here."""
        for leased in self._leases.values():
            yield from leased
        for tables in self._reservations.values():
            for table in tables:
                yield from table.pages

    def _fresh(
        self, count: int, *, after: PageId | None, num_kept: int, untouchable: Set[int]
    ) -> list[PageId]:
        """Up to `count` pages: as many as there is room for, in front of any untouchable one."""
        count = max(0, min(count, self._pages.num_free - num_kept))
        taken = self._pages.allocate(count, after=after) or []
        usable = list(takewhile(lambda page: page not in untouchable, taken))
        self._pages.release(taken[len(usable) :])
        return usable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    tokens: tuple[TokenId, ...]
    pages: list[PageId]
    salt: str


def _known(leased: Sequence[PageId], arriving: dict[PageId, PageId]) -> list[PageId]:
    """Pages of a prefix that another request of the same lease begins with too."""
    return [arriving[page] for page in takewhile(arriving.__contains__, leased)]
