"""Oracle: decoding everything at once."""

from collections.abc import Sequence

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
    pieces = [decoder.feed(group) for group in _in_groups(tokens, sizes)]
    assert "".join(pieces) == byte_level.decode(tokens)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


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


def test_raw_bytes_of_a_sentencepiece_vocabulary_join_into_characters(
    byte_fallback: Tokenizer,
) -> None:
    tokens = byte_fallback.encode("the🙂🙃")
    decoder = StreamDecoder(byte_fallback)
    pieces = [decoder.feed([token]) for token in tokens]
    assert [piece for piece in pieces if piece] == [" the", "🙂", "🙃"]
