"""Which tokens of a batch to draft, compared with an exhaustive search."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.control.goodput.allocation import Entry, Prices, best_allocation

chances = st.floats(0.0, 1.0)
steps = st.lists(st.floats(0.0, 0.4), min_size=9, max_size=9)


def _sums(increments: list[float]) -> list[float]:
    return [sum(increments[:count]) for count in range(len(increments) + 1)]


def _prices(
    level: list[float], rows: list[float], *, rate: float = 1.0, overlapped: bool = False
) -> Prices:
    return Prices(
        rate=rate,
        first_s=_sums(level),
        later_s=_sums(level),
        verify_s=[1.0 + seconds for seconds in _sums(rows)],
        drafting_s=0.1,
        overlapped=overlapped,
    )


def _entries(survival: list[list[float]]) -> list[Entry]:
    return sorted(
        (-chance, level, owner, -chance)
        for owner, chain in enumerate(survival)
        for level, chance in enumerate(chain)
    )


def _value(counts: list[int], tokens: float, prices: Prices) -> float:
    """Returns tokens less their price, by the formula."""
    drafting = prices.drafting_s
    drafting += sum(
        (prices.later_s if level else prices.first_s)[count] for level, count in enumerate(counts)
    )
    verifying = prices.verify_s[sum(counts)]
    seconds = max(drafting, verifying) if prices.overlapped else drafting + verifying
    return tokens - prices.rate * (seconds - prices.start())


@given(st.lists(chances, min_size=1, max_size=5), steps, steps, st.floats(0.1, 4.0), st.booleans())
def test_of_one_level_no_set_of_tokens_earns_more(
    survival: list[float], level: list[float], rows: list[float], rate: float, overlapped: bool
) -> None:
    prices = _prices(level, rows, rate=rate, overlapped=overlapped)
    found = best_allocation(_entries([[chance] for chance in survival]), prices)
    owners = range(len(survival))
    sets = [chosen for size in range(len(owners) + 1) for chosen in combinations(owners, size)]
    best = max(_value([len(c)], sum(survival[i] for i in c), prices) for c in sets)
    mine = _value([len(found.owners)], sum(survival[i] for i in found.owners), prices)
    assert found.value == pytest.approx(best, abs=1e-9)
    assert mine == pytest.approx(best, abs=1e-9)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(chances, chances), min_size=2, max_size=3),
    st.floats(0.0, 0.6),
    st.floats(0.0, 0.05),
    st.floats(0.0, 0.3),
    st.floats(0.1, 4.0),
)
def test_of_several_levels_no_lengths_of_all_requests_earn_more(
    requests: list[tuple[float, float]],
    level_s: float,
    draft_row_s: float,
    verify_row_s: float,
    rate: float,
) -> None:
    """A level has a fixed cost, and all rows cost the same."""
    survival = [[first * theta**level for level in range(3)] for first, theta in requests]
    rows = [draft_row_s] * 8
    prices = _prices([level_s + draft_row_s, *rows], [verify_row_s] * 9, rate=rate)
    best = 0.0
    for lengths in product(range(4), repeat=len(requests)):
        counts = [sum(length > level for length in lengths) for level in range(3)]
        tokens = sum(sum(chain[:k]) for chain, k in zip(survival, lengths, strict=True))
        best = max(best, _value(counts, tokens, prices))
    assert best_allocation(_entries(survival), prices).value == pytest.approx(best, abs=1e-9)


def test_while_another_microbatch_is_verified_drafting_is_free_up_to_its_verify_time() -> None:
    alone, beside = (_prices([0.3] * 9, [0.0] * 9, overlapped=o) for o in (False, True))
    entries = _entries([[0.2]])
    assert not best_allocation(entries, alone).owners
    assert best_allocation(entries, beside).owners == {0}


def test_the_draw_decides_and_the_mean_says_what_it_is_worth() -> None:
    prices = _prices([0.2] * 9, [0.1] * 9)
    found = best_allocation([(-0.9, 0, 0, -0.1)], prices)
    assert found.owners == {0}
    assert found.value == pytest.approx(0.9 - 0.3)
    assert found.expected_value == pytest.approx(0.1 - 0.3)
