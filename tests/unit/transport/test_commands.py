"""Commands arrive as they were announced, or are rejected."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from eesd_dist.errors import WireError
from eesd_dist.page_table import PageTable
from eesd_dist.transport import wire
from eesd_dist.transport.commands import (
    ChainRecord,
    Command,
    DraftChains,
    MoveSlots,
    RunHead,
    RunLayers,
    RunLogits,
    StoreHeadKv,
    TakeHead,
    decode_command,
    encode_command,
)
from eesd_dist.transport.contracts import Record, RowSegment

counts = st.integers(0, 2**31 - 1)


@st.composite
def rows(draw: st.DrawFn) -> RowSegment:
    num_drafted = draw(st.integers(0, 6))
    return RowSegment(
        start=draw(st.integers(0, 5000)),
        num_rows=draw(st.integers(1, 5)),
        pages=PageTable(draw(st.lists(counts, max_size=9))),
        parents=tuple(draw(st.integers(-1, node - 1)) for node in range(num_drafted)),
    )


@st.composite
def commands(draw: st.DrawFn) -> Command:
    segments = draw(st.lists(rows(), min_size=1, max_size=4))
    num_rows = sum(segment.num_rows for segment in segments)
    x = torch.arange(num_rows * 3, dtype=torch.float32).view(num_rows, 3)
    choices: list[Command] = [
        RunLayers(tokens=list(range(num_rows)), segments=segments),
        RunHead(segments=segments, hidden_TD=x),
        StoreHeadKv(segments=segments, hidden_TD=x),
        RunLogits(exit_AD=x.bfloat16()),
        chains_command(
            [replace(segment, start=5000, parents=()) for segment in segments],
            x if draw(st.booleans()) else None,
        ),
        MoveSlots(moves=[(num_rows, 4), (5, 6)]),
        TakeHead(folder=draw(st.text(max_size=30)), sha256="ab" * 32),
    ]
    return draw(st.sampled_from(choices))


def chains_command(segments: list[RowSegment], lagging_LD: Tensor | None) -> DraftChains:
    num_lagging = 0 if lagging_LD is None else lagging_LD.shape[0]
    return DraftChains(
        chains=[
            ChainRecord(
                tokens=list(range(segment.num_rows)),
                segment=segment,
                max_draft=at,
                num_lagging=num_lagging if not at else 0,
                prices=0,
                curve=at % 2,
                numbers=tuple(0.1 * n for n in range(12)),
                temperature=0.7,
                seed=2**63 + at,
                mask=b"\x01" * (4 * at),
            )
            for at, segment in enumerate(segments)
        ],
        prices=[np.array([0.0, 0.1 + 0.2])],
        curves=[np.zeros((0, 2)), np.array([[0.1, 0.3]])],
        lagging_LD=lagging_LD,
    )


def decoded(message: wire.Message, *, epoch: int = 4) -> Command:
    return command_of(message.joined(), epoch=epoch)


def command_of(content: memoryview, *, epoch: int = 4) -> Command:
    prefix = wire.decode_prefix(content, epoch=epoch)
    return decode_command(prefix, content, wire.inline_tensors(prefix, content)[0])


def plain(command: Command) -> tuple[object, list[object]]:
    """Returns a comparable form: tensors as lists, with their types."""
    fields = [getattr(command, name) for name in command.__struct_fields__]
    return type(command), [_comparable(x) for x in fields]


def _comparable(x: object) -> object:
    if isinstance(x, list):
        return [_comparable(item) for item in x]
    return (x.dtype, x.shape, x.tolist()) if isinstance(x, Tensor | np.ndarray) else x


@given(commands())
@settings(max_examples=60, deadline=None)
def test_a_command_arrives_as_it_was_announced(command: Command) -> None:
    received = decoded(encode_command(command, epoch=4, number=9))
    assert plain(received) == plain(command)


def test_a_command_of_any_length_is_one_message() -> None:
    segment = RowSegment(0, 20_000, PageTable(range(300)))
    command = RunLayers(tokens=list(range(20_000)), segments=[segment])
    assert plain(decoded(encode_command(command, epoch=4, number=1))) == plain(command)


def test_a_command_of_another_epoch_is_refused() -> None:
    message = encode_command(MoveSlots(moves=((1, 2),)), epoch=4, number=1)
    with pytest.raises(WireError, match="epoch 4, expected 5"):
        decoded(message, epoch=5)


@given(commands(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_command_with_a_broken_bit_is_refused(command: Command, data: st.DataObject) -> None:
    content = encode_command(command, epoch=4, number=2).joined()
    prefix = wire.decode_prefix(content, epoch=4)
    at = data.draw(st.integers(0, wire.PREFIX_BYTES + prefix.payload_bytes - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        command_of(content)


@pytest.mark.parametrize(
    ("segment", "changes", "error"),
    [
        (RowSegment(3, 2, PageTable((1,)), (-1, 0)), {}, "expected no parents"),
        (RowSegment(1, 2, PageTable((1,))), {}, "found 2 rows before KV slot 1"),
        (RowSegment(3, 1, PageTable((1,))), {}, "found 2 rows in a command, expected 1 by its"),
        (RowSegment(3, 2, PageTable((1,))), {"prices": []}, "found prices 0 in a command"),
        (RowSegment(3, 2, PageTable((1,))), {"prices": [np.zeros((2, 2))]}, "prices of shape"),
        (RowSegment(3, 2, PageTable((1,))), {"curves": [np.zeros(4)]}, "curve of shape"),
    ],
)
def test_chains_that_cannot_be_are_refused(
    segment: RowSegment, changes: dict[str, object], error: str
) -> None:
    command = chains_command([segment], torch.zeros(2, 3))
    if segment.num_rows == 1:
        (chain,) = command.chains
        command = replace(command, chains=[replace(chain, num_lagging=1)])
    with pytest.raises(WireError, match=error):
        decoded(encode_command(replace(command, **changes), epoch=4, number=1))


GOOD = RowSegment(3, 2, PageTable((1, 0)), (-1, 0))


@pytest.mark.parametrize(
    ("segment", "error"),
    [
        (replace(GOOD, start=-1), r"Expected `int` >= 0 .*\[0\]"),
        (replace(GOOD, num_rows=0), r"Expected `int` >= 1 .*\[1\]"),
        (replace(GOOD, pages=PageTable((1, -3))), r"Expected pages >= 0, got -3 .*\[2\]"),
        (replace(GOOD, parents=(-1, 1)), "a drafted row before it"),
        (replace(GOOD, num_rows=3), "found 2 tokens in a command, expected 3"),
    ],
)
def test_rows_that_cannot_be_are_refused(segment: RowSegment, error: str) -> None:
    command = RunLayers(tokens=(5, 6), segments=(segment,))
    with pytest.raises(WireError, match=error):
        decoded(encode_command(command, epoch=4, number=1))


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (RunLayers(tokens=(), segments=()), "Expected `array` of length >= 1"),
        (RunHead(segments=(), hidden_TD=torch.zeros(0, 3)), "Expected `array` of length >= 1"),
        (RunLogits(exit_AD=torch.zeros(0, 3)), "found 0 rows to draft from"),
        (MoveSlots(moves=()), "Expected `array` of length >= 1"),
    ],
)
def test_a_command_that_asks_for_nothing_is_refused(command: Command, error: str) -> None:
    with pytest.raises(WireError, match=error):
        decoded(encode_command(command, epoch=4, number=1))


def test_rows_without_their_tensor_are_refused() -> None:
    message = encode_command(
        RunHead(segments=(GOOD,), hidden_TD=torch.zeros(2, 3)), epoch=4, number=1
    )
    content = message.joined()
    prefix = wire.decode_prefix(content, epoch=4)
    with pytest.raises(WireError, match="no rows with command 1"):
        decode_command(prefix, content, None)
    with pytest.raises(WireError, match="found 5 rows in a command, expected 2"):
        decode_command(prefix, content, torch.zeros(5, 3))


def test_a_round_is_not_taken_for_a_command() -> None:
    content = wire.encode_close(epoch=4).joined()
    prefix = wire.decode_prefix(content, epoch=4)
    with pytest.raises(WireError, match="found a CLOSE message, expected a COMMAND"):
        decode_command(prefix, content, None)


def test_a_token_that_does_not_fit_a_word_is_refused() -> None:
    command = RunLayers(tokens=(2**31, 1), segments=(GOOD,))
    with pytest.raises(WireError, match="Expected `int` <= 2147483647"):
        decoded(encode_command(command, epoch=4, number=1))


def test_a_token_that_no_integer_holds_is_refused_where_it_is_written() -> None:
    command = RunLayers(tokens=(2**64, 1), segments=(GOOD,))
    with pytest.raises(WireError, match="does not fit its field"):
        encode_command(command, epoch=4, number=1)


def test_an_operation_that_this_version_does_not_have_is_refused() -> None:
    class Dance(Record, frozen=True, tag=True):
        pass

    message = wire.message_of(wire.Kind.COMMAND, epoch=4, round_id=1, content=Dance())
    with pytest.raises(WireError, match="COMMAND message 1: Invalid value 'Dance'"):
        decoded(message)
