"""Pages: conservation, owners, prefixes and eviction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.types import PageId
from tests.unit.schedule.hash_stages import make_pages


def _take(pages: PageAllocator, count: int) -> list[PageId]:
    allocated = pages.allocate(count)
    assert allocated is not None
    return allocated


def _serve(pages: PageAllocator, tokens: list[int], *, salt: str = "exit") -> list[PageId]:
    """Runs a request that computes all its tokens and ends; returns its page table."""
    table = pages.match_prefix(tokens, salt=salt)
    table += _take(pages, pages.pages_for(len(tokens)) - len(table))
    pages.register(tokens, table, num_computed=len(tokens), salt=salt)
    pages.release(table)
    return table


def test_too_few_pages_take_nothing() -> None:
    pages = make_pages(4)
    _take(pages, 3)
    assert pages.allocate(2) is None
    assert pages.num_free == 1
    pages.check()


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pages = make_pages(4, prefix_caching=False)
    shared = _take(pages, 2)
    pages.retain(shared)
    pages.release(shared)
    assert pages.num_free == 2
    pages.release(shared)
    assert pages.num_free == 4
    pages.check()


def test_releasing_a_page_without_an_owner_is_a_bug_that_is_named() -> None:
    pages = make_pages(4)
    with pytest.raises(AssertionError, match="page 3 was released and has no owner"):
        pages.release([PageId(3)])


def test_a_prefix_is_found_again_up_to_its_last_full_page() -> None:
    pages = make_pages(16, page_size=4)
    table = _serve(pages, list(range(11)))
    assert pages.match_prefix([*range(11), 99, 98], salt="exit") == table[:2]
    assert pages.num_owners(table[0]) == 1
    assert pages.num_owners(table[2]) == 0


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    pages = make_pages(16, page_size=4)
    table = _serve(pages, list(range(8)))
    assert pages.match_prefix(list(range(8)), salt="exit") == table[:1]


def test_a_page_is_found_only_behind_the_same_beginning_and_salt() -> None:
    pages = make_pages(16, page_size=4)
    _serve(pages, list(range(9)))
    assert pages.match_prefix([7, *range(1, 9)], salt="exit") == []
    assert pages.match_prefix(list(range(9)), salt="plain") == []


def test_without_prefix_caching_nothing_is_found() -> None:
    pages = make_pages(16, prefix_caching=False)
    _serve(pages, list(range(12)))
    assert pages.match_prefix(list(range(12)), salt="exit") == []
    assert pages.num_cached == 0


def test_pages_that_are_computed_in_steps_are_found_like_those_computed_at_once() -> None:
    pages = make_pages(16, page_size=4)
    tokens = list(range(13))
    table = _take(pages, 4)
    for num_computed in (3, 4, 9, 13):
        pages.register(tokens, table, num_computed=num_computed, salt="exit")
        assert len(pages.match_prefix([*tokens, 0], salt="exit")) == num_computed // 4


def test_the_second_copy_of_a_page_is_freed_and_the_first_stays_findable() -> None:
    pages = make_pages(16, page_size=4)
    tokens = list(range(8))
    first, second = _take(pages, 2), _take(pages, 2)
    pages.register(tokens, first, num_computed=8, salt="exit")
    pages.register(tokens, second, num_computed=8, salt="exit")
    pages.release(second)
    pages.release(first)
    pages.check()
    assert pages.num_cached == 2
    assert pages.match_prefix([*tokens, 9], salt="exit") == first


def test_the_prefix_used_longest_ago_is_evicted_first_and_from_its_end() -> None:
    pages = make_pages(8, page_size=4)
    old, young = list(range(100, 116)), list(range(200, 216))
    old_table = _serve(pages, old)
    _serve(pages, young)
    assert pages.num_cached == pages.num_free == 8
    _take(pages, 3)
    pages.check()
    assert pages.match_prefix([*old, 0], salt="exit") == old_table[:1]
    assert len(pages.match_prefix([*young, 0], salt="exit")) == 4


def test_nothing_is_evicted_while_a_page_is_free() -> None:
    pages = make_pages(16, page_size=4)
    text = list(range(32))
    table = _serve(pages, text)
    for _ in range(3):
        others = [_take(pages, 1) for _ in range(8)]  # eight requests that grow by turns
        for other in reversed(others):
            pages.release(other)
    assert pages.match_prefix([*text, 0], salt="exit") == table
    pages.check()


def test_after_a_store_is_lost_nothing_is_findable() -> None:
    pages = make_pages(8, page_size=4)
    _serve(pages, list(range(16)))
    held = pages.match_prefix(list(range(16)), salt="exit")
    pages.forget_cached()
    assert pages.match_prefix(list(range(16)), salt="exit") == []
    pages.release(held)
    pages.check()
    assert pages.num_cached == 0
    assert pages.num_free == 8


def test_the_law_that_broke_is_named() -> None:
    pages = make_pages(4)
    _take(pages, 1)
    pages._free.append(PageId(0))
    with pytest.raises(AssertionError, match=r"page 0 is \['free', 'owned'\]"):
        pages.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pages_are_conserved_whatever_happens(data: st.DataObject) -> None:
    pages = make_pages(12, page_size=2)
    tables: list[tuple[list[int], list[PageId]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) and tables:
            tokens, table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            computed = data.draw(st.integers(0, len(tokens)))
            pages.register(tokens, table, num_computed=computed, salt="exit")
            pages.release(table)
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
            table = pages.match_prefix(tokens, salt="exit")
            allocated = pages.allocate(pages.pages_for(len(tokens)) - len(table))
            if allocated is None:
                pages.release(table)
            else:
                tables.append((tokens, table + allocated))
        pages.check()
        owned = [page for _, table in tables for page in table]
        assert all(pages.num_owners(page) == owned.count(page) for page in set(owned))
        assert pages.num_free == 12 - len(set(owned))
