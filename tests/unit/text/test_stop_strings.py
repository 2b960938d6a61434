"""Oracle: the complete text, cut at the first complete stop string."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.text import StopStrings


def _push_all(stops: StopStrings, token_texts: list[str]) -> tuple[str, str | None, int]:
    text, num_tokens = "", 0
    for token_text in token_texts:
        checked = stops.push([token_text])
        text += checked.text
        num_tokens += checked.num_tokens
        if checked.matched is not None:
            return text, checked.matched, num_tokens
    return text + stops.finish(), None, num_tokens


def _naive(text: str, stops: list[str]) -> str:
    for end in range(len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return text[: end - max(map(len, endings))]
    return text


_letters = st.text("ab", max_size=4)
_stops = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


@given(token_texts=st.lists(_letters, max_size=8), stops=_stops)
def test_the_text_is_cut_where_the_first_stop_string_is_complete(
    token_texts: list[str], stops: list[str]
) -> None:
    text, matched, num_tokens = _push_all(StopStrings(stops), token_texts)
    assert text == _naive("".join(token_texts), stops)
    if matched is not None:
        assert text + matched == "".join(token_texts[:num_tokens])[: len(text + matched)]
        assert len(text + matched) > len("".join(token_texts[: num_tokens - 1]))


@given(token_texts=st.lists(_letters, max_size=8), stops=_stops, include=st.booleans())
def test_it_does_not_matter_how_many_pieces_come_at_a_time(
    token_texts: list[str], stops: list[str], include: bool
) -> None:
    at_once = StopStrings(stops, include_in_output=include)
    checked = at_once.push(token_texts)
    suffix = "" if checked.matched else at_once.finish()
    by_token = _push_all(StopStrings(stops, include_in_output=include), token_texts)
    assert by_token == (checked.text + suffix, checked.matched, checked.num_tokens)


def test_a_possible_beginning_is_held_back_and_released_when_it_was_none() -> None:
    stops = StopStrings(["END"])
    assert stops.push(["it is the E"]).text == "it is the "
    assert stops.push(["N"]).text == ""
    assert stops.push(["OUGH"]).text == "ENOUGH"
    assert stops.finish() == ""


def test_a_match_across_three_tokens_says_which_token_was_the_last() -> None:
    checked = StopStrings(["\n\n"]).push(["one", "\n", "\ntwo", "three"])
    assert (checked.text, checked.matched, checked.num_tokens) == ("one", "\n\n", 3)


@pytest.mark.parametrize(("include", "text"), [(False, "a "), (True, "a stop")])
def test_the_stop_string_stays_only_when_asked_for(include: bool, text: str) -> None:
    stops = StopStrings(["stop"], include_in_output=include)
    assert stops.push(["a ", "st", "op", " b"]).text == text


def test_the_first_pieces_can_be_exempt() -> None:
    stops = StopStrings(["a"], min_tokens=2)
    assert stops.push(["a", "ba", "ca"]).text == "abac"


def test_long_stop_strings_that_are_nearly_there_take_linear_time() -> None:
    stops = StopStrings(["a" * 1023 + "c", *["b" * i + "a" * 1000 + "b" for i in range(15)]])
    began_s = time.process_time()
    shown = sum(len(stops.push(["a"]).text) for _ in range(5_000))
    assert shown + len(stops.finish()) == 5_000
    assert time.process_time() - began_s < 2.0  # looking for each at each length takes ten
