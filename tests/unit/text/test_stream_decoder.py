"""Oracle: decoding everything at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.text import StreamDecoder, Tokenizer
from eesd_dist.types import TokenId


def _in_groups(tokens: Sequence[TokenId], sizes: Sequence[int]) -> list[Sequence[TokenId]]:
    groups, start = [], 0
    for size in (*sizes, len(tokens)):
        groups.append(tokens[start : start + size])
        start += size
    return groups


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20), sizes=st.lists(st.integers(1, 5), max_size=8))
def test_the_pieces_make_the_text_and_none_splits_a_character(
    byte_level: Tokenizer, text: str, sizes: list[int]
) -> None:
    tokens = byte_level.encode(text)
    decoder = StreamDecoder(byte_level)
    texts = [decoder.feed(group) for group in _in_groups(tokens, sizes)]
    assert "".join(texts) == byte_level.decode(tokens)
    assert "\ufffd" not in "".join(texts) or "\ufffd" in text


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_even_broken_bytes_read_as_if_decoded_at_once(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    ids = st.integers(0, byte_level.vocab_size - 1).map(TokenId)
    tokens = data.draw(st.lists(ids, max_size=25))
    end = byte_level.encode(".")
    decoder = StreamDecoder(byte_level)
    assert decoder.feed([*tokens, *end]) == byte_level.decode([*tokens, *end])


def test_an_unfinished_emoji_is_held_back_until_its_last_byte(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("🙂")
    assert len(tokens) == 4
    decoder = StreamDecoder(byte_level)
    assert [decoder.feed([token]) for token in tokens] == ["", "", "", "🙂"]


def test_special_tokens_are_skipped_or_shown_as_asked(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("hi<|end|>")
    assert StreamDecoder(byte_level).feed(tokens) == "hi"
    assert StreamDecoder(byte_level, skip_special_tokens=False).feed(tokens) == "hi<|end|>"


def test_a_continuation_keeps_its_first_space(byte_fallback: Tokenizer) -> None:
    tokens = byte_fallback.encode("the")
    assert byte_fallback.decode(tokens) == "the"
    assert StreamDecoder(byte_fallback).feed(tokens) == " the"


def test_a_run_of_raw_bytes_is_shown_when_it_ends(byte_fallback: Tokenizer) -> None:
    tokens = [*byte_fallback.encode("the🙂🙃"), *byte_fallback.encode("the")]
    decoder = StreamDecoder(byte_fallback)
    texts = [decoder.feed([token]) for token in tokens]
    assert [text for text in texts if text] == [" the", "🙂🙃 the"]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_run_of_raw_bytes_that_no_token_follows(byte_fallback: Tokenizer, is_cut: bool) -> None:
    tokens = byte_fallback.encode("the🙂🙃")
    decoder = StreamDecoder(byte_fallback)
    assert decoder.feed(tokens[:-1] if is_cut else tokens) == " the"
    assert decoder.finish() == ("🙂" if is_cut else "🙂🙃")
    assert decoder.finish() == ""


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_runs_of_raw_bytes_read_as_transformers_decodes_them(
    byte_fallback: Tokenizer, data: st.DataObject
) -> None:
    runs = st.sampled_from([b"\xf0\x9f\x99\x82", b"\xe2\x82", b"\xff", b"a", b"\xc3\xa9"])
    the = byte_fallback.encode("the")
    raw = {byte_fallback.token_bytes(id_): id_ for id_ in byte_fallback.raw_byte_ids}
    chunks = data.draw(st.lists(runs | st.just(None), max_size=6))
    tokens = list(the)
    for chunk in chunks:
        tokens += the if chunk is None else [raw[bytes([byte])] for byte in chunk]
    tokens += the
    expected = byte_fallback._backend.decode(tokens, clean_up_tokenization_spaces=False)
    assert byte_fallback.decode(tokens) == expected
    decoder = StreamDecoder(byte_fallback)
    assert decoder.feed(tokens) + decoder.finish() == f" {expected}"
