"""Prompt lookup: earlier occurrences of a text's last tokens."""

from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.engine.drafting.ngrams import MOST_CONTEXT, Match, NgramIndex
from eesd_dist.types import TokenId

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def _tokens(text: str) -> list[TokenId]:
    return [TokenId(ord(letter)) for letter in text]


def _match(text: str, limit: int) -> tuple[int, str] | None:
    match = NgramIndex().match(_tokens(text), limit)
    return None if match is None else (match.context, "".join(map(chr, match.tokens)))


def test_it_finds_what_followed_the_last_tokens_before() -> None:
    assert _match("the cat sat. the c", 3) == (5, "at ")
    assert _match("no pair twice", 3) is None
    assert _match("a", 3) is None
    assert _match("", 3) is None
    assert _match("the cat. the c", 0) is None


def test_the_longest_context_wins_and_of_equal_ones_the_latest() -> None:
    assert _match("xabc1 yabc2 zbc3 xabc", 1) == (4, "1")
    assert _match("1abc1 2abc2 3abc", 1) == (3, "2")


def test_at_the_end_of_the_text_what_repeats_itself_goes_on() -> None:
    assert _match("ababab", 5) == (4, "ababa")
    assert _match("zzz", 4) == (2, "zzzz")


@given(texts, st.integers(1, 8))
def test_every_match_is_one_however_the_text_came(text: list[int], limit: int) -> None:
    tokens = [TokenId(token) for token in text]
    index = NgramIndex()
    grown = [index.match(tokens[:end], limit) for end in range(1, len(tokens) + 1)][-1]
    match = NgramIndex().match(tokens, limit)
    assert match == grown
    places = [
        position
        for position in range(1, len(tokens) - 1)
        if tokens[position - 1 : position + 1] == tokens[-2:]
    ]
    assert (match is None) == (not places or len(tokens) < 2)
    if match is None:
        return
    assert len(match.tokens) == limit
    following = [_followed(tokens, position, match) for position in places]
    assert any(following)


def _followed(tokens: list[TokenId], position: int, match: Match) -> bool:
    context = tokens[: position + 1][-match.context :]
    goes_on = [*tokens, *match.tokens][position + 1 : position + 1 + len(match.tokens)]
    return context == tokens[-match.context :] and goes_on == match.tokens


def test_a_long_prompt_is_read_over_several_rounds() -> None:
    tokens = _tokens("abcd" * 1_000)
    index = NgramIndex()
    assert index.match(tokens, 2) is None
    match = index.match(tokens, 2)
    assert match == Match(MOST_CONTEXT, _tokens("ab"))
