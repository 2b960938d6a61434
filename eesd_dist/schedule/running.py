"""The running requests: their pages, and their split into microbatches.

Decides how far a page table grows. Which request starts, and which makes room, is decided by the
scheduler.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from itertools import takewhile

from eesd_dist.schedule.live import LiveRequest
from eesd_dist.schedule.page_leases import LeasedPages
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.types import PageId, RequestId


class RunningRequests:
    """The requests that hold pages of one allocator, in the order in which they started."""

    def __init__(self, pages: PageAllocator, *, max_running: int) -> None:
        self.pages = pages
        self._lives: dict[RequestId, LiveRequest] = {}
        self._fair_share = pages.num_pages // max_running

    def __len__(self) -> int:
        return len(self._lives)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._lives.values())

    def __contains__(self, live: object) -> bool:
        return isinstance(live, LiveRequest) and self._lives.get(live.request_id) is live

    def find(self, request_id: RequestId) -> LiveRequest | None:
        return self._lives.get(request_id)

    def start(self, live: LiveRequest) -> bool:
        """Starts a request if its known tokens fit; returns whether it did."""
        live.add_pages(self._cached(live))
        num_cached = len(live.pages) * self.pages.page_size
        if not self.grow(live, self.num_missing(live)):
            self.pages.release(live.drop_pages(len(live.pages)))
            return False
        live.num_computed = num_cached
        self._lives[live.request_id] = live
        return True

    def stop(self, live: LiveRequest) -> None:
        """Removes a request and releases its pages; its tokens stay."""
        del self._lives[live.request_id]
        self.pages.release(live.drop_pages(len(live.pages)))
        live.num_computed = 0
        live.in_flight = False

    def advance(self, live: LiveRequest, *, num_computed: int) -> None:
        """Notes that more positions are computed, and makes full pages findable."""
        size = self.pages.page_size
        if num_computed // size > live.num_computed // size:
            self.pages.register(live.tokens, live.pages, num_computed=num_computed, salt=live.salt)
        live.num_computed = num_computed

    def num_missing(self, live: LiveRequest, *, extra: int = 0) -> int:
        """Returns how many pages it lacks for its known tokens and `extra` more."""
        return self.pages.pages_for(live.num_tokens + extra) - len(live.pages)

    def grow(self, live: LiveRequest, count: int) -> bool:
        """Appends `count` pages to its table if there are so many; returns whether it did."""
        pages = self.pages.allocate(count)
        live.add_pages(pages or ())
        return pages is not None

    def trim(self, lives: Iterable[LiveRequest]) -> None:
        """Releases pages that were allocated for drafts."""
        for live in lives:
            surplus = -self.num_missing(live)
            if surplus > 0 and not live.in_flight:
                self.pages.release(live.drop_pages(surplus))

    def draft_room(self, live: LiveRequest) -> tuple[int, int]:
        """Allocates spare pages for a draft; returns its maximum depth and number of tokens."""
        max_nodes = live.max_nodes
        missing = self.num_missing(live, extra=max_nodes)
        if missing > 0:
            # A draft never takes a page that another request's known tokens may need next.
            num_spare = self.pages.num_free - (len(self) - 1)
            self.grow(live, max(0, min(missing, num_spare)))
            room = len(live.pages) * self.pages.page_size - live.num_tokens
            max_nodes = min(max_nodes, room)
        return min(live.max_draft, max_nodes), max_nodes

    def lacking(self, live: LiveRequest) -> tuple[Set[PageId], int]:
        """Returns cached pages of its known tokens, and how many are too few for the others and one
        more; at most 0 if there are enough. With no other running request it may take the last."""
        cached = self._cached(live)
        num_reserved = 1 if self._lives else 0
        missing = self.pages.pages_for(live.num_tokens) - len(cached)
        num_lacking = missing + num_reserved - self.pages.num_free
        self.pages.release(cached)
        return frozenset(cached), num_lacking

    def num_spoken_for(self, entering: Iterable[LiveRequest]) -> int:
        """Returns how many free pages to keep for these requests and the entering ones, each up to
        its fair share. They may need more, but few answers reach their maximum length."""
        return sum(max(1, self._fair_need(live) - len(live.pages)) for live in self) + sum(
            max(self.num_missing(live), self._fair_need(live)) for live in entering
        )

    def full_pages(self, live: LiveRequest, *, untouchable: Set[int]) -> LeasedPages:
        """Returns the pages that another pipeline may read: full ones, up to the first untouchable
        one."""
        size = self.pages.page_size
        full = live.pages[: live.num_computed // size]
        pages = tuple(takewhile(lambda page: page not in untouchable, full))
        return LeasedPages(
            request_id=live.request_id,
            tokens=tuple(live.tokens[: len(pages) * size]),
            pages=pages,
            drafts=live.drafts,
            cache_salt=live.request.cache_salt,
        )

    def check(self, leased: Iterable[PageId]) -> None:
        """Raises AssertionError when page tables, leases and the allocator disagree."""
        self.pages.check()
        num_owners = [0] * self.pages.num_pages
        for page in (*leased, *(page for live in self for page in live.pages)):
            num_owners[page] += 1
        for page, count in zip(map(PageId, range(len(num_owners))), num_owners, strict=True):
            actual = self.pages.num_owners(page)
            assert count == actual, f"page {page} is in {count} tables and has {actual} owners"

    def _cached(self, live: LiveRequest) -> Sequence[PageId]:
        """Returns cached pages of its known tokens, which it owns from now on."""
        # Every row is computed where features or log-probabilities of all are returned.
        if live.request.features is not None or live.wants_prompt_logprobs:
            return ()
        return self.pages.match_prefix(live.tokens, salt=live.salt)

    def _fair_need(self, live: LiveRequest) -> int:
        """Returns the pages that a request may grow to, at most its fair share."""
        return min(self.pages.pages_for(live.max_len - 1), self._fair_share)


class Microbatches:
    """Splits the running requests into two microbatches that alternate, or leaves them in one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._overlaps = count == 2

    def set_overlap(self, overlap: bool) -> None:
        self._overlaps = overlap and self.count == 2

    def smaller(self, running: Collection[LiveRequest], *, prefer: int) -> int:
        if not self._overlaps:
            return 0
        sizes = _sizes(running)
        return min(
            range(self.count), key=lambda microbatch: (sizes[microbatch], microbatch != prefer)
        )

    def balance(self, running: Collection[LiveRequest]) -> None:
        """Evens out the microbatches by moving requests that are not in flight."""
        if not self._overlaps:
            for live in running:
                if live.microbatch and not live.in_flight:
                    live.microbatch = 0
            return
        sizes = _sizes(running)
        larger = 0 if sizes[0] > sizes[1] else 1
        num_moves = abs(sizes[0] - sizes[1]) // 2
        if num_moves == 0:
            return
        idle = [v for v in running if v.microbatch == larger and not v.in_flight]
        for live in idle[len(idle) - min(num_moves, len(idle)) :]:
            live.microbatch = 1 - larger


def _sizes(running: Collection[LiveRequest]) -> list[int]:
    in_second = sum(live.microbatch for live in running)
    return [len(running) - in_second, in_second]
