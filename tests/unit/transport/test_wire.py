"""What goes in comes out, bit for bit; what was broken on the way is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.errors import WireError
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.types import Traffic
from tests.unit.transport.rounds import header, headers, hidden, reply_with, segment


def through_the_wire(message: wire.Message, *, generation: int) -> RoundHeader:
    prefix = wire.decode_prefix(message.frame, generation=generation)
    return wire.decode_round(prefix, message.frame, message.overflow)


def reply_through_the_wire(message: wire.Message) -> VerifyReply:
    prefix = wire.decode_prefix(message.frame, generation=3)
    return wire.decode_reply(prefix, message.frame, message.overflow)


def header_words(message: wire.Message) -> int:
    prefix = wire.decode_prefix(message.frame, generation=3)
    return (wire.PREFIX_BYTES + prefix.payload_bytes) // 4


@settings(max_examples=60, deadline=None)
@given(sent=headers())
def test_every_header_arrives_as_it_left(sent: RoundHeader) -> None:
    message = wire.encode_round(sent, hidden(sent.num_rows, 3))
    assert through_the_wire(message, generation=sent.generation) == sent


@settings(max_examples=80, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    num_accepted=st.integers(0, 40),
    num_tops=st.integers(0, 20),
    wants_logprobs=st.booleans(),
    seconds=st.floats(0, 1e6),
    size_bytes=st.integers(0, 2**63 - 1),
)
def test_every_reply_arrives_as_it_left(
    num_tokens: int,
    num_accepted: int,
    num_tops: int,
    wants_logprobs: bool,
    seconds: float,
    size_bytes: int,
) -> None:
    rng = np.random.default_rng(num_tokens)
    sent = VerifyReply(
        round_id=9,
        tokens=rng.integers(0, 2**31, num_tokens, np.int32),
        accepted=rng.integers(0, 2, num_accepted, np.int32),
        logprobs=rng.random(num_tokens if wants_logprobs else 0, np.float32),
        top_ids=rng.integers(0, 2**31, (num_tokens, num_tops), np.int32),
        top_logprobs=rng.random((num_tokens, num_tops), np.float32),
        verify_s=seconds,
        received_to_sent_s=seconds / 3,
        group=Traffic(sent_bytes=size_bytes, received_bytes=size_bytes // 2, wait_s=seconds / 7),
    )
    message = wire.encode_reply(sent, generation=4)
    sent = dataclasses.replace(sent, wire_bytes=sum(part.nbytes for part in message.words))
    prefix = wire.decode_prefix(message.frame, generation=4)
    got = wire.decode_reply(prefix, message.frame, message.overflow)
    for field in dataclasses.fields(VerifyReply):
        a, b = getattr(got, field.name), getattr(sent, field.name)
        np.testing.assert_array_equal(a, b, err_msg=field.name, strict=True)


def test_a_reply_that_counts_backwards_is_refused() -> None:
    broken = dataclasses.replace(reply_with([1, 2]), group=Traffic(sent_bytes=-1))
    with pytest.raises(WireError, match="found -1 bytes sent and 0 received"):
        reply_through_the_wire(wire.encode_reply(broken, generation=3))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), bit=st.integers(0, 31))
def test_one_flipped_bit_anywhere_in_a_reply_is_refused(data: st.DataObject, bit: int) -> None:
    message = wire.encode_reply(reply_with([1, 2, 3]), generation=3)
    word = data.draw(st.integers(0, header_words(message) - 1))
    words = message.frame.numpy().view(np.uint32)
    words[word] ^= np.uint32(1 << bit)
    with pytest.raises(WireError):
        reply_through_the_wire(message)


def test_a_header_longer_than_a_frame_travels_in_a_second_message() -> None:
    sent = dataclasses.replace(header(), segments=(segment(history=tuple(range(20_000))),))
    message = wire.encode_round(sent, hidden())
    assert message.overflow is not None
    assert through_the_wire(message, generation=3) == sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_small_tensors_ride_in_the_frame_and_keep_their_bits(dtype: torch.dtype) -> None:
    sent_TD, sent_KV = hidden(4, 16, dtype), torch.rand(3, 9)
    message = wire.encode_round(header(), sent_TD, sent_KV)
    prefix = wire.decode_prefix(message.frame, generation=3)
    assert message.beside == ()
    got_TD, got_KV = wire.inline_tensors(prefix, message.frame)
    assert got_TD is not None
    assert got_KV is not None
    assert torch.equal(got_TD, sent_TD)
    assert got_TD.dtype == dtype
    assert torch.equal(got_KV, sent_KV)


def test_large_tensors_are_announced_and_travel_beside_the_frame() -> None:
    big_TD = hidden(4, 5000)
    message = wire.encode_round(header(), big_TD)
    prefix = wire.decode_prefix(message.frame, generation=3)
    assert not prefix.tensors_are_inline
    assert prefix.hidden == wire.TensorShape(rows=4, columns=5000, dtype=torch.float32)
    assert message.beside == (big_TD,)


def test_a_message_of_another_generation_is_refused() -> None:
    message = wire.encode_round(header(generation=3), hidden())
    with pytest.raises(WireError, match="generation 3, expected 4"):
        wire.decode_prefix(message.frame, generation=4)


def test_a_message_of_another_version_or_of_somebody_else_is_refused() -> None:
    frame = wire.encode_round(header(), hidden()).frame.clone()
    frame[1] += 1
    versions = f"wire version {wire.VERSION + 1}, expected {wire.VERSION}"
    with pytest.raises(WireError, match=versions):
        wire.decode_prefix(frame, generation=3)
    frame[0] = 0
    with pytest.raises(WireError, match="found magic 0x0"):
        wire.decode_prefix(frame, generation=3)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), bit=st.integers(0, 31))
def test_one_flipped_bit_anywhere_in_a_header_is_refused(data: st.DataObject, bit: int) -> None:
    message = wire.encode_round(header(), hidden())
    word = data.draw(st.integers(0, header_words(message) - 1))
    words = message.frame.numpy().view(np.uint32)
    words[word] ^= np.uint32(1 << bit)
    with pytest.raises(WireError):
        through_the_wire(message, generation=3)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_message_cut_short_is_refused(data: st.DataObject) -> None:
    message = wire.encode_round(header(), hidden())
    kept = data.draw(st.integers(0, header_words(message) - 1))
    with pytest.raises(WireError, match="found"):
        through_the_wire(dataclasses.replace(message, frame=message.frame[:kept]), generation=3)


def test_hidden_states_cut_short_are_refused() -> None:
    message = wire.encode_round(header(), hidden())
    prefix = wire.decode_prefix(message.frame, generation=3)
    with pytest.raises(WireError, match="found a frame of 400 bytes"):
        wire.inline_tensors(prefix, message.frame[:100])


def test_an_overflow_that_never_came_or_is_another_is_refused() -> None:
    long = dataclasses.replace(header(), segments=(segment(history=tuple(range(20_000))),))
    message = wire.encode_round(long, hidden())
    assert message.overflow is not None
    message.overflow[9] += 1
    with pytest.raises(WireError, match="payload checksum"):
        through_the_wire(message, generation=3)
    with pytest.raises(WireError, match="bytes of payload: found 0"):
        through_the_wire(dataclasses.replace(message, overflow=None), generation=3)


def test_a_reply_where_a_round_is_expected_is_refused() -> None:
    message = wire.encode_reply(reply_with([1, 2]), generation=3)
    with pytest.raises(WireError, match="found a REPLY message, expected a ROUND"):
        through_the_wire(message, generation=3)


def test_hidden_states_that_do_not_belong_to_the_segments_are_not_sent() -> None:
    with pytest.raises(WireError, match="3 rows of hidden states, its segments have 4"):
        wire.encode_round(header(num_rows=4), hidden(3))


def test_a_number_too_large_for_its_field_is_not_sent() -> None:
    big = dataclasses.replace(segment(), seed=2**64)
    with pytest.raises(WireError, match="does not fit its field"):
        wire.encode_round(dataclasses.replace(header(), segments=(big,)), hidden())


def tree(*parents: int, num_known: int = 1) -> RoundHeader:
    rows = num_known + len(parents)
    branching = dataclasses.replace(
        segment(num_rows=rows), num_sampled=1 + len(parents), parents=parents
    )
    return dataclasses.replace(header(num_rows=rows), segments=(branching,))


@pytest.mark.parametrize("parents", [(-1, -1, 0, 0, 1), (-1,), (-1, 0, -1)])
def test_a_tree_and_its_moves_arrive_as_they_left(parents: tuple[int, ...]) -> None:
    sent = dataclasses.replace(tree(*parents, num_known=3), kv_moves=((7, 3), (9, 4)))
    message = wire.encode_round(sent, hidden(sent.num_rows))
    assert through_the_wire(message, generation=3) == sent


def test_a_chain_pays_nothing_for_trees() -> None:
    plain = header(num_rows=4)
    with_move = dataclasses.replace(plain, kv_moves=((2, 1),))
    sizes = [header_words(wire.encode_round(sent, hidden())) for sent in (plain, with_move)]
    listed = sum(len(s.pages) + len(s.tokens) + len(s.stop_token_ids) for s in plain.segments)
    biases = sum(len(s.logit_bias) for s in plain.segments)
    counts, trace, seed_and_doubles, table = 4, 6, 2 + 2 * 6, 13
    prefix = wire.PREFIX_BYTES // 4
    assert sizes[0] == prefix + counts + trace + seed_and_doubles + table + listed + 3 * biases
    assert sizes[1] == sizes[0] + 1 + 1 + 2  # counts of moves and of parents, and one move


@pytest.mark.parametrize(
    ("parents", "found"),
    [((-1, 1), "parent 1 of drafted row 1"), ((0,), "parent 0"), ((-1, 0, -2), "parent -2")],
)
def test_a_tree_that_refers_ahead_or_out_of_range_is_refused(
    parents: tuple[int, ...], found: str
) -> None:
    sent = tree(*parents)
    message = wire.encode_round(sent, hidden(sent.num_rows))
    with pytest.raises(WireError, match=found):
        through_the_wire(message, generation=3)


def test_a_tree_with_rows_too_few_or_too_many_is_refused() -> None:
    for num_sampled in (2, 4):
        whole = tree(-1, -1, num_known=3)
        cut = dataclasses.replace(whole.segments[0], num_sampled=num_sampled)
        message = wire.encode_round(
            dataclasses.replace(whole, segments=(cut,)), hidden(whole.num_rows)
        )
        with pytest.raises(WireError, match=f"2 parents in a segment with {num_sampled} sampled"):
            through_the_wire(message, generation=3)


def test_a_move_from_nowhere_is_refused() -> None:
    message = wire.encode_round(dataclasses.replace(header(), kv_moves=((3, 2), (-1, 5))), hidden())
    with pytest.raises(WireError, match="slot -1 in a KV move"):
        through_the_wire(message, generation=3)
