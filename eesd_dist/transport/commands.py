"""Commands from the drafting actor to the other ranks of its stage, and their encoding.

A command is one operation on the rows it names: the layers, the exit head's layer, its logits, the
drafting of a round, a copy of slots, a change of the head. It is one message in the format of
`wire`, with the command's number in the field of the round's id. Nothing here sends or computes.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta
from msgspec.msgpack import Decoder
from msgspec.structs import replace
from torch import Tensor, empty

from eesd_dist.errors import WireError
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import Doubles, Move, Record, RowSegment
from eesd_dist.types import Count

# Shapes: T rows, E width of the exit head's input, A rows that are drafted from, D hidden size,
# L rows that the head has not read, K tokens at most, C points.

_Segments = Annotated[Sequence[RowSegment], Meta(min_length=1)]


class _Operation(Record, frozen=True, tag=True):
    """Base of all commands; the class name is the tag in the encoding."""


class RunLayers(_Operation, frozen=True, kw_only=True):
    """Runs the embedding and layers [0, N) over these tokens."""

    tokens: Sequence[Count]
    segments: _Segments


class RunHead(_Operation, frozen=True, kw_only=True, eq=False):
    """Runs the exit head's layer over rows that come with the command."""

    segments: _Segments
    hidden_TD: Tensor


class StoreHeadKv(_Operation, frozen=True, kw_only=True, eq=False):
    """Writes the exit head's keys and values of rows that come with the command."""

    segments: _Segments
    hidden_TD: Tensor


class RunLogits(_Operation, frozen=True, kw_only=True, eq=False):
    """Runs the exit head's norm and LM head over rows that its layer has computed."""

    exit_AD: Tensor


class ChainRecord(Record, frozen=True, kw_only=True):
    """A request of a round that is drafted in one call: `backends.api.ChainStart`."""

    tokens: Annotated[Sequence[Count], Meta(min_length=1)]
    segment: RowSegment
    max_draft: Count
    num_lagging: Count
    """Number of rows of the command that belong to it."""
    prices: Count
    """Index of the prices of its rule."""
    curve: Count
    """Index of the curve of its rule."""
    numbers: Annotated[tuple[float, ...], Meta(min_length=12, max_length=12)]
    """The other numbers of its rule, in their order."""
    temperature: float
    seed: int
    mask: bytes


class DraftChains(_Operation, frozen=True, kw_only=True, eq=False):
    """Runs known rows of requests, and drafts after them, in one call."""

    chains: Annotated[Sequence[ChainRecord], Meta(min_length=1)]
    prices: Sequence[Doubles]
    """[K + 1] each."""
    curves: Sequence[Doubles]
    """[C, 2] each."""
    lagging_LD: Tensor | None
    """The rows before the known ones that the head has not read, chain by chain; None: none."""


class MoveSlots(_Operation, frozen=True, kw_only=True):
    """Copies slots of the layers and of the head; all are read before any is written."""

    moves: Annotated[Sequence[Move], Meta(min_length=1)]


class TakeHead(_Operation, frozen=True, kw_only=True):
    """Switches to this exit head, unless it is the present one."""

    folder: str
    sha256: str


Command = RunLayers | RunHead | StoreHeadKv | RunLogits | DraftChains | MoveSlots | TakeHead

_TO_COME = empty(0)
"""Placeholder for a tensor while its command is decoded."""


def _tensor_or_decoded(kind: object, encoded: object) -> object:
    """Decodes page tables and arrays; tensors follow the payload."""
    return _TO_COME if kind is Tensor else wire.decoded(kind, encoded)


_commands: Decoder[Command] = Decoder(Command, dec_hook=_tensor_or_decoded)


def encode_command(command: Command, *, epoch: int, number: int) -> wire.Message:
    match command:
        case RunHead(hidden_TD=rows) | StoreHeadKv(hidden_TD=rows) | RunLogits(exit_AD=rows):
            separate: Tensor | None = rows
        case DraftChains(lagging_LD=rows):
            separate = rows
        case _:
            separate = None
    return wire.message_of(
        wire.Kind.COMMAND,
        epoch=epoch,
        round_id=number,
        content=command,
        hidden_TD=separate,
    )


def decode_command(prefix: wire.Prefix, content: memoryview, rows: Tensor | None) -> Command:
    """Returns the command. `rows` is the tensor announced in the prefix, of the message or received
    after it. Raises WireError for a command that does not fit its rows."""
    command = wire.decode_payload(_commands, prefix, content, expected=wire.Kind.COMMAND)
    match command:
        case RunLayers(tokens=tokens, segments=segments):
            _expect_rows("tokens", len(tokens), segments)
        case RunHead(segments=segments) | StoreHeadKv(segments=segments):
            command = replace(command, hidden_TD=_require_rows(rows, prefix))
            _expect_rows("rows", command.hidden_TD.shape[0], segments)
        case DraftChains():
            command = replace(command, lagging_LD=rows)
            _check_chains(command)
        case RunLogits():
            command = replace(command, exit_AD=_require_rows(rows, prefix))
            if command.exit_AD.shape[0] < 1:
                raise WireError("found 0 rows to draft from in a command, expected one or more")
    return command


def _check_chains(command: DraftChains) -> None:
    for prices in command.prices:
        if prices.ndim != 1 or not len(prices):
            raise WireError(f"found prices of shape {prices.shape} in a command, expected [K + 1]")
    for curve in command.curves:
        if curve.ndim != 2 or curve.shape[1] != 2:
            raise WireError(f"found a curve of shape {curve.shape} in a command, expected [C, 2]")
    for chain in command.chains:
        segment = chain.segment
        _expect_rows("tokens", len(chain.tokens), [segment])
        if segment.parents:
            raise WireError("found a tree in a command that drafts chains, expected no parents")
        if chain.num_lagging > segment.start:
            raise WireError(
                f"found {chain.num_lagging} rows before KV slot {segment.start} in a command, "
                f"expected {segment.start} or fewer"
            )
        for name, at, tables in (
            ("prices", chain.prices, command.prices),
            ("a curve", chain.curve, command.curves),
        ):
            if at >= len(tables):
                raise WireError(f"found {name} {at} in a command, expected less than {len(tables)}")
    num_rows = 0 if command.lagging_LD is None else command.lagging_LD.shape[0]
    expected = sum(chain.num_lagging for chain in command.chains)
    if num_rows != expected:
        raise WireError(f"found {num_rows} rows in a command, expected {expected} by its chains")


def _require_rows(rows: Tensor | None, prefix: wire.Prefix) -> Tensor:
    if rows is None:
        raise WireError(f"found no rows with command {prefix.round_id}, expected a matrix")
    return rows


def _expect_rows(what: str, num_rows: int, segments: Sequence[RowSegment]) -> None:
    for segment in segments:
        wire.check_tree(segment.parents)
    expected = sum(segment.num_rows for segment in segments)
    if num_rows != expected:
        raise WireError(
            f"found {num_rows} {what} in a command, expected {expected} by its segments"
        )
