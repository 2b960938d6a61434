"""Messages are decoded bit for bit; damaged messages are rejected."""

import tracemalloc
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from eesd_dist.errors import WireError
from eesd_dist.page_table import PageTable
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import RoundHeader, RowFeatures, VerifyReply
from eesd_dist.types import Traffic
from tests.unit.transport.rounds import header, headers, hidden, reply_with, segment


def through_the_wire(message: wire.Message, *, epoch: int) -> RoundHeader:
    return round_of(message.joined(), epoch=epoch)


def round_of(content: memoryview, *, epoch: int = 3) -> RoundHeader:
    return wire.decode_round(wire.decode_prefix(content, epoch=epoch), content)


def reply_through_the_wire(message: wire.Message) -> VerifyReply:
    return reply_of(message.joined())


def reply_of(content: memoryview, *, epoch: int = 3) -> VerifyReply:
    return wire.decode_reply(wire.decode_prefix(content, epoch=epoch), content)


def size_of(message: wire.Message) -> int:
    """Returns the bytes of prefix and payload."""
    return message.buffers[0].nbytes


@settings(max_examples=60, deadline=None)
@given(round_header=headers())
def test_every_header_arrives_as_it_left(round_header: RoundHeader) -> None:
    message = wire.encode_round(round_header, hidden(round_header.num_rows, 3))
    assert through_the_wire(message, epoch=round_header.epoch) == round_header


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
    reply = VerifyReply(
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
    message = wire.encode_reply(reply, epoch=4)
    reply = replace(reply, wire_bytes=message.size_bytes)
    got = reply_of(message.joined(), epoch=4)
    for name in VerifyReply.__struct_fields__:
        a, b = getattr(got, name), getattr(reply, name)
        np.testing.assert_array_equal(a, b, err_msg=name, strict=True)


FEATURES = RowFeatures(
    hidden=(np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)),
    top_ids=np.array([[7, 8], [9, 10]], np.int32),
    top_logits=np.array([[0.5, 0.25], [1.5, -2.0]], np.float32),
    lse=np.array([1.0, 2.0], np.float32),
)


def test_features_arrive_as_they_left_however_large() -> None:
    for width in (3, 4000):
        wide = replace(FEATURES, hidden=(np.random.rand(2, width).astype(np.float32),))
        reply = replace(reply_with([1, 2]), features=wide)
        got = reply_through_the_wire(wire.encode_reply(reply, epoch=3)).features
        assert got is not None
        np.testing.assert_array_equal(got.hidden[0], wide.hidden[0], strict=True)
        for name in ("top_ids", "top_logits", "lse"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wide, name), strict=True)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"lse": np.zeros((2, 1), np.float32)}, "dimensions of lse: found 2, expected 1"),
        ({"lse": np.zeros(3, np.float32)}, "rows of best tokens: found 2, expected 3"),
        ({"top_ids": np.zeros((2, 3), np.int32)}, r"\(2, 3\) tokens and \(2, 2\) logits"),
        ({"hidden": (np.zeros((1, 3), np.float32),)}, "rows of hidden states: found 1"),
        ({"hidden": (np.zeros(2, np.float32),)}, "dimensions of hidden states: found 1"),
    ],
)
def test_features_that_contradict_each_other_are_refused(
    odd: dict[str, object], reason: str
) -> None:
    broken = replace(reply_with([1, 2]), features=replace(FEATURES, **odd))
    with pytest.raises(WireError, match=reason):
        reply_through_the_wire(wire.encode_reply(broken, epoch=3))


def test_a_reply_that_counts_backwards_is_refused() -> None:
    broken = replace(reply_with([1, 2]), group=Traffic(sent_bytes=-1))
    with pytest.raises(WireError, match=r"REPLY message 17: Expected `int` >= 0 .*sent_bytes"):
        reply_through_the_wire(wire.encode_reply(broken, epoch=3))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_in_a_reply_is_refused(data: st.DataObject, bit: int) -> None:
    content = wire.encode_reply(reply_with([1, 2, 3]), epoch=3).joined()
    content[data.draw(st.integers(0, content.nbytes - 1))] ^= 1 << bit
    with pytest.raises(WireError):
        reply_of(content)


def test_a_header_of_any_length_is_one_message() -> None:
    round_header = replace(header(), segments=(segment(history=tuple(range(20_000))),))
    assert through_the_wire(wire.encode_round(round_header, hidden()), epoch=3) == round_header


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 16, 5000])
def test_tensors_travel_with_the_message_keep_their_bits_and_are_aligned(
    dtype: torch.dtype, width: int
) -> None:
    hidden_TD, probs_KV = hidden(4, width, dtype), torch.rand(3, 9)
    message = wire.encode_round(header(), hidden_TD, probs_KV)
    assert message.separate == ()
    content = message.joined()
    prefix = wire.decode_prefix(content, epoch=3)
    assert prefix.hidden == wire.TensorShape(
        rows=4, columns=width, dtype=str(dtype).removeprefix("torch.")
    )
    tensors = wire.inline_tensors(prefix, content)
    for x, expected in zip(tensors, (hidden_TD, probs_KV), strict=True):
        assert x is not None
        assert torch.equal(x, expected)
        assert x.dtype == expected.dtype
        assert x.data_ptr() % 64 == 0


def test_tensors_without_values_and_with_gaps_arrive_as_they_left() -> None:
    empty_KV, gaps_TD = torch.rand(0, 9), hidden(4, 8)[:, ::2]
    content = wire.encode_round(header(), gaps_TD, empty_KV).joined()
    got_TD, got_KV = wire.inline_tensors(wire.decode_prefix(content, epoch=3), content)
    assert got_TD is not None
    assert torch.equal(got_TD, gaps_TD)
    assert got_KV is not None
    assert got_KV.shape == (0, 9)


def test_a_message_of_another_epoch_is_refused() -> None:
    message = wire.encode_round(header(epoch=3), hidden())
    with pytest.raises(WireError, match="epoch 3, expected 4"):
        wire.decode_prefix(message.joined(), epoch=4)


def test_a_message_of_another_version_or_protocol_is_refused() -> None:
    content = wire.encode_round(header(), hidden()).joined()
    content[4] += 1  # after the four bytes of magic
    versions = f"wire version {wire.VERSION + 1}, expected {wire.VERSION}"
    with pytest.raises(WireError, match=versions):
        wire.decode_prefix(content, epoch=3)
    content[:4] = bytes(4)
    with pytest.raises(WireError, match="found magic 0x0"):
        wire.decode_prefix(content, epoch=3)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_in_a_header_is_refused(data: st.DataObject, bit: int) -> None:
    message = wire.encode_round(header(), hidden())
    content = message.joined()
    content[data.draw(st.integers(0, size_of(message) - 1))] ^= 1 << bit
    with pytest.raises(WireError):
        round_of(content)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_message_cut_short_is_refused(data: st.DataObject) -> None:
    content = wire.encode_round(header(), hidden(), torch.rand(3, 5)).joined()
    num_bytes = data.draw(st.integers(0, content.nbytes - 1))
    with pytest.raises(WireError, match="found"):
        round_of(content[:num_bytes])


def test_a_message_with_more_than_it_announces_is_refused() -> None:
    content = wire.encode_round(header(), hidden()).joined()
    with pytest.raises(WireError, match="bytes of the message: found"):
        round_of(memoryview(bytearray(content) + b"x"))


def test_a_reply_where_a_round_is_expected_is_refused() -> None:
    message = wire.encode_reply(reply_with([1, 2]), epoch=3)
    with pytest.raises(WireError, match="found a REPLY message, expected a ROUND"):
        through_the_wire(message, epoch=3)


def test_hidden_states_that_do_not_belong_to_the_segments_are_not_sent() -> None:
    with pytest.raises(WireError, match="3 rows of hidden states, its segments have 4"):
        wire.encode_round(header(num_rows=4), hidden(3))


def test_a_number_too_large_for_its_field_is_not_sent() -> None:
    big = replace(segment(), params=replace(segment().params, seed=2**64))
    with pytest.raises(WireError, match="does not fit its field"):
        wire.encode_round(replace(header(), segments=(big,)), hidden())


def tree(*parents: int, num_prefix_rows: int = 1) -> RoundHeader:
    rows = num_prefix_rows + len(parents)
    branching = replace(segment(num_rows=rows), num_sampled=1 + len(parents), parents=parents)
    return replace(header(num_rows=rows), segments=(branching,))


@pytest.mark.parametrize("parents", [(-1, -1, 0, 0, 1), (-1,), (-1, 0, -1)])
def test_a_tree_and_its_moves_arrive_as_they_left(parents: tuple[int, ...]) -> None:
    round_header = replace(tree(*parents, num_prefix_rows=3), kv_moves=((7, 3), (9, 4)))
    message = wire.encode_round(round_header, hidden(round_header.num_rows))
    assert through_the_wire(message, epoch=3) == round_header


def test_a_segment_pays_five_bytes_for_what_it_does_not_want_and_a_move_three() -> None:
    plain = header(num_rows=4)
    with_move = replace(plain, kv_moves=((2, 1),))
    without = wire._encoder.encode(
        [list(msgspec.structs.astuple(segment))[:-4] for segment in plain.segments]
    )
    segments = wire._encoder.encode(plain.segments)
    assert len(segments) == len(without) + 5 * len(plain.segments)  # features, forced, masks
    sizes = [
        size_of(wire.encode_round(round_header, hidden())) for round_header in (plain, with_move)
    ]
    assert sizes[1] == sizes[0] + 3  # one move: an array of two small numbers


@pytest.mark.parametrize(
    ("parents", "error"),
    [
        ((-1, 1), "parent 1 of drafted row 1"),
        ((0,), "parent 0"),
        ((-1, 0, -2), "Expected `int` >= -1"),
    ],
)
def test_a_tree_that_refers_ahead_or_out_of_range_is_refused(
    parents: tuple[int, ...], error: str
) -> None:
    round_header = tree(*parents)
    message = wire.encode_round(round_header, hidden(round_header.num_rows))
    with pytest.raises(WireError, match=error):
        through_the_wire(message, epoch=3)


def test_a_tree_with_rows_too_few_or_too_many_is_refused() -> None:
    for num_sampled in (2, 4):
        whole = tree(-1, -1, num_prefix_rows=3)
        cut = replace(whole.segments[0], num_sampled=num_sampled)
        message = wire.encode_round(replace(whole, segments=(cut,)), hidden(whole.num_rows))
        with pytest.raises(WireError, match=f"2 parents in a segment with {num_sampled} sampled"):
            through_the_wire(message, epoch=3)


def test_more_forced_and_sampled_rows_than_there_are_are_refused() -> None:
    segment = replace(header().segments[0], forced=(7,))
    message = wire.encode_round(replace(header(), segments=(segment,)), hidden(4))
    with pytest.raises(WireError, match="1 forced and 4 sampled rows in a segment, expected 4"):
        through_the_wire(message, epoch=3)


def test_masks_of_different_sizes_are_refused() -> None:
    segment = replace(header().segments[0], masks=bytes(9))
    message = wire.encode_round(replace(header(), segments=(segment,)), hidden(4))
    with pytest.raises(WireError, match="9 bytes of masks in a segment with 4 sampled"):
        through_the_wire(message, epoch=3)


def test_a_move_from_nowhere_is_refused() -> None:
    message = wire.encode_round(replace(header(), kv_moves=((3, 2), (-1, 5))), hidden())
    with pytest.raises(WireError, match=r"ROUND message 17: Expected `int` >= 0 .*\[6\]"):
        through_the_wire(message, epoch=3)


def lying(payload: bytes, *, kind: wire.Kind = wire.Kind.ROUND, num_rows: int = 4) -> wire.Message:
    """Returns a message with correct checksums, for any payload."""
    return wire.message_of(
        kind,
        epoch=3,
        round_id=17,
        content=msgspec.Raw(payload),  # type: ignore[arg-type]
        hidden_TD=hidden(num_rows) if kind is wire.Kind.ROUND else None,
    )


def payload_of(message: wire.Message) -> bytes:
    return bytes(message.buffers[0][wire.PREFIX_BYTES :])


REPLY = replace(
    reply_with([1, 2]), top_ids=np.ones((2, 3), np.int32), top_logprobs=np.ones((2, 3), np.float32)
)
HONEST = {
    wire.Kind.ROUND: payload_of(wire.encode_round(header(), hidden())),
    wire.Kind.REPLY: payload_of(wire.encode_reply(REPLY, epoch=3)),
}


def read(message: wire.Message, kind: wire.Kind) -> RoundHeader | VerifyReply:
    if kind is wire.Kind.ROUND:
        return through_the_wire(message, epoch=3)
    return reply_through_the_wire(message)


@pytest.mark.parametrize("kind", HONEST)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_payload_changed_before_its_checksum_is_refused_or_within_its_bounds(
    kind: wire.Kind, data: st.DataObject
) -> None:
    changed = bytearray(HONEST[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    try:
        content = read(lying(bytes(changed), kind=kind), kind)
    except WireError:
        return
    if isinstance(content, RoundHeader):
        assert 0 <= content.num_sampled <= content.num_rows == 4
        assert all(min(s.pages, default=0) >= 0 for s in content.segments)
    else:
        assert content.top_ids.shape == content.top_logprobs.shape


@pytest.mark.parametrize("kind", HONEST)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_payload_cut_short_before_its_checksum_is_refused(
    kind: wire.Kind, data: st.DataObject
) -> None:
    num_bytes = data.draw(st.integers(0, len(HONEST[kind]) - 1))
    with pytest.raises(WireError, match="truncated"):
        read(lying(HONEST[kind][:num_bytes], kind=kind), kind)


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("length", [b"\xdd\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_length_without_its_bytes_costs_no_memory(kind: wire.Kind, length: bytes) -> None:
    """Announces an array of 2**31 - 1, or 4 GiB of bytes, at every position of a message."""
    messages = [
        lying(HONEST[kind][:at] + length + HONEST[kind][at:], kind=kind)
        for at in range(len(HONEST[kind]))
    ]
    tracemalloc.start()
    for message in messages:
        with pytest.raises(WireError):
            read(message, kind)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


_PAYLOAD_BYTES, _DTYPE, _ROWS, _COLUMNS = 6, 8, 10, 11
"""Indices of fields in a prefix."""


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({2: 0}, "broken prefix: 0 is not a valid Kind"),
        ({_PAYLOAD_BYTES: wire.MAX_PAYLOAD_BYTES + 1}, "payload of 268435457 bytes, expected"),
        ({_ROWS: 2**20, _COLUMNS: 2**20}, "expected a size that fits in memory"),
        ({_ROWS: 2**32 - 1, _COLUMNS: 2**32 - 1}, "expected a size that fits in memory"),
        ({_DTYPE: 4}, "broken prefix"),
        ({_DTYPE: 0}, "bytes of the message"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused_before_there_is_room_for_its_message(
    fields: dict[int, int], error: str
) -> None:
    content = wire.encode_round(header(), hidden()).joined()
    values = list(wire._PREFIX.unpack_from(content))
    for index, value in fields.items():
        values[index] = value
    prefix = wire._PREFIX.pack(*values)
    content[: wire.PREFIX_BYTES] = prefix + wire._CRC.pack(zlib.crc32(prefix))
    with pytest.raises(WireError, match=error):
        wire.decode_prefix(content, epoch=3)


@pytest.mark.parametrize(
    "change",
    [
        {"start": -1},
        {"start": 2**31},
        {"num_rows": -1},
        {"pages": PageTable((0, -1))},
        {"tokens": (1, 2, 3, -4)},
        {"history": (-1,)},
        {"num_prompt": -1},
        {"top_logprobs": -1},
    ],
)
def test_a_value_out_of_its_bounds_is_refused(change: dict[str, Any]) -> None:
    (name,) = change
    at = list(segment().__struct_fields__).index(name)
    round_header = replace(header(), segments=(replace(segment(), **change),))
    with pytest.raises(WireError, match=rf"ROUND message 17: .* at `\$\[2\]\[0\]\[{at}\]"):
        read(lying(wire._encoder.encode(round_header)), wire.Kind.ROUND)


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": -2},
        {"seed": 0.5},
        {"min_tokens": -1},
        {"stop_token_ids": (2**31,)},
        {"logit_bias": ((-1, 0.5),)},
        {"temperature": "hot"},
    ],
)
def test_a_parameter_out_of_its_bounds_is_refused(change: dict[str, Any]) -> None:
    (name,) = change
    at = list(segment().__struct_fields__).index("params")
    entry = list(segment().params.__struct_fields__).index(name)
    changed = replace(segment(), params=replace(segment().params, **change))
    encoded = wire._encoder.encode(replace(header(), segments=(changed,)))
    with pytest.raises(
        WireError, match=rf"ROUND message 17: .* at `\$\[2\]\[0\]\[{at}\]\[{entry}\]"
    ):
        read(lying(encoded), wire.Kind.ROUND)


def test_a_header_that_contradicts_its_prefix_is_refused() -> None:
    for round_header, what in ((header(18), "round"), (header(epoch=4), "epoch")):
        with pytest.raises(WireError, match=f"{what} of the header: found"):
            read(lying(wire._encoder.encode(round_header)), wire.Kind.ROUND)


def test_a_reply_with_arrays_that_contradict_each_other_is_refused() -> None:
    odd = replace(REPLY, top_logprobs=np.ones((2, 2), np.float32))
    with pytest.raises(WireError, match=r"found \(2, 3\) alternatives with \(2, 2\)"):
        reply_through_the_wire(wire.encode_reply(odd, epoch=3))
    square = replace(REPLY, tokens=np.ones((1, 2), np.int32))
    with pytest.raises(WireError, match="dimensions of tokens: found 2, expected 1"):
        reply_through_the_wire(wire.encode_reply(square, epoch=3))
    wide = replace(REPLY, tokens=np.ones(2, np.int64))
    with pytest.raises(WireError, match="Expected `array` of <i4, got <i8"):
        reply_through_the_wire(wire.encode_reply(wide, epoch=3))
