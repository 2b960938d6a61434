"""The allocator of KV pages.

One allocator at rank 0 decides for every stage: page p is page p in each stage's store. A page is
exactly one of

    free      without an owner; its content means nothing
    cached    without an owner, but findable by the tokens it was computed from
    owned     in the page table of one request, or of several that share a prefix

Cached pages are evicted only when no page is free, the least recently used first.
This module deals with page numbers and token ids, not with requests, rounds or tensors.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b

from eesd_dist.types import PageId


class PageAllocator:
    """Allocates pages, counts their owners and keeps the digests of full pages' tokens."""

    def __init__(self, *, num_pages: int, page_size: int, prefix_caching: bool) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._free = deque(map(PageId, range(num_pages)))
        self._num_owners = [0] * num_pages
        # Least recently used first; only pages without an owner.
        self._cached: OrderedDict[PageId, None] = OrderedDict()
        # A page may have a digest without being findable: another page had the content first.
        self._digest_of: dict[PageId, bytes] = {}
        self._page_of: dict[bytes, PageId] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now: free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages without an owner that are still findable."""
        return len(self._cached)

    def num_owners(self, page: PageId) -> int:
        return self._num_owners[page]

    def pages_for(self, num_positions: int) -> int:
        """Returns the number of pages for so many positions."""
        return -(-num_positions // self.page_size)

    def allocate(self, count: int) -> list[PageId] | None:
        """Returns `count` pages with one owner each, or None when there are not enough."""
        if count > self.num_free:
            return None
        self._evict(count - len(self._free))
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def retain(self, pages: Sequence[PageId]) -> None:
        """Adds an owner to each page."""
        for page in pages:
            if self._num_owners[page] == 0:
                del self._cached[page]
            self._num_owners[page] += 1

    def release(self, pages: Sequence[PageId]) -> None:
        """Removes an owner from each page; a page without owners becomes cached or free."""
        # The last page is released first, so that eviction shortens a prefix from its end.
        for page in reversed(pages):
            assert self._num_owners[page] > 0, f"page {page} was released and has no owner"
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                self._abandon(page)

    def match_prefix(self, tokens: Sequence[int], *, salt: str) -> list[PageId]:
        """Returns the longest prefix of these tokens in full pages, and adds an owner to each.

        Never covers all tokens: the last one must be computed, since its row gets the verdict.
        """
        prefix: list[PageId] = []
        if not self._page_of:
            return prefix
        digest = _root(salt)
        for index in range((len(tokens) - 1) // self.page_size):
            digest = self._next_digest(digest, tokens, index)
            page = self._page_of.get(digest)
            if page is None:
                break
            prefix.append(page)
        self.retain(prefix)
        return prefix

    def register(
        self, tokens: Sequence[int], pages: Sequence[PageId], *, num_computed: int, salt: str
    ) -> None:
        """Makes the pages that lie completely below `num_computed` findable by their tokens."""
        if not self.prefix_caching:
            return
        num_full = num_computed // self.page_size
        first = num_full
        while first > 0 and pages[first - 1] not in self._digest_of:
            first -= 1
        digest = self._digest_of[pages[first - 1]] if first > 0 else _root(salt)
        for index in range(first, num_full):
            digest = self._next_digest(digest, tokens, index)
            self._digest_of[pages[index]] = digest
            self._page_of.setdefault(digest, pages[index])

    def forget_cached(self) -> None:
        """Frees cached pages and forgets all digests; call when a stage has lost its store."""
        self._evict(len(self._cached))
        self._digest_of.clear()
        self._page_of.clear()

    def check(self) -> None:
        """Raises AssertionError that names a broken invariant, if there is one."""
        free = set(self._free)
        for page in map(PageId, range(self.num_pages)):
            states = {
                "free": page in free,
                "cached": page in self._cached,
                "owned": self._num_owners[page] > 0,
            }
            names = [name for name, holds in states.items() if holds]
            assert len(names) == 1, f"page {page} is {names}, expected one of {list(states)}"
            assert not (states["free"] and page in self._digest_of), f"free page {page} is known"
        assert len(free) == len(self._free), "a page is free twice"
        for digest, page in self._page_of.items():
            assert self._digest_of.get(page) == digest, f"page {page} is found by other tokens"
        for page in self._cached:
            assert self._is_findable(page), f"page {page} is cached and not findable"

    def _abandon(self, page: PageId) -> None:
        if self._is_findable(page):
            self._cached[page] = None
        else:
            self._digest_of.pop(page, None)
            self._free.append(page)

    def _evict(self, count: int) -> None:
        """Frees the `count` least recently used cached pages, or all when there are fewer."""
        for _ in range(min(count, len(self._cached))):
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
            self._free.append(page)

    def _is_findable(self, page: PageId) -> bool:
        digest = self._digest_of.get(page)
        return digest is not None and self._page_of.get(digest) == page

    def _next_digest(self, parent: bytes, tokens: Sequence[int], index: int) -> bytes:
        """Returns the digest of all tokens up to the end of page `index`. 128 bits, so that
        collisions can be neglected."""
        first = index * self.page_size
        content = array("q", tokens[first : first + self.page_size]).tobytes()
        return blake2b(parent + content, digest_size=16).digest()


def _root(salt: str) -> bytes:
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
