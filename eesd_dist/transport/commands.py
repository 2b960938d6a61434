"""What the drafting actor tells the other ranks of its stage to compute, and how that is written.

A command is one operation on the rows it names: the layers, the exit head's layer, its logits, a
move of slots, another head. It is one message of the form that `wire` describes; its number stands
where a round's id would. Nothing here sends, computes or knows what a row means.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Protocol

import numpy as np
from torch import Tensor

from eesd_dist.errors import WireError
from eesd_dist.transport import wire
from eesd_dist.trees import first_misplaced

# Shapes: T rows, E what the exit head reads of a row, A rows that guesses follow, D hidden size.


class RowsLike(Protocol):
    """One request's rows: places [start, start + num_rows) of its page table."""

    @property
    def start(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def parents(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The same, as it arrives."""

    start: int
    num_rows: int
    pages: tuple[int, ...]
    parents: tuple[int, ...]
    """Of a drafted tree that ends with these rows; empty where every row follows the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayers:
    """Embedding and layers [0, N) over these tokens."""

    tokens: Sequence[int]
    segments: Sequence[RowsLike]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunHead:
    """The exit head's layer over rows that are handed along."""

    segments: Sequence[RowsLike]
    input_TE: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLogits:
    """The exit head's norm and LM head over rows that its layer has computed."""

    exit_AD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSlots:
    """Copies slots of the layers and of the head, (from, to) each; all are read first."""

    moves: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeHead:
    """Goes on with this exit head, unless it is the present one."""

    folder: str
    sha256: str


Command = RunLayers | RunHead | RunLogits | MoveSlots | TakeHead


class _Operation(IntEnum):
    LAYERS = 1
    HEAD = 2
    LOGITS = 3
    MOVE = 4
    TAKE_HEAD = 5


_COUNTS = struct.Struct("<iii")
"""Operation and two counts. Rows: segments, tokens. Move: moves. Head: bytes of folder, of hash."""
_COLUMNS = 4


def encode_command(command: Command, *, generation: int, number: int) -> wire.Message:
    try:
        payload, rows = _written(command)
    except (OverflowError, TypeError, struct.error) as error:
        raise WireError(
            f"command {number} has a value that does not fit its field: {error}"
        ) from error
    return wire.message_of(
        wire.Kind.COMMAND,
        generation=generation,
        round_id=number,
        payload=payload,
        num_words=wire.ROUND_FRAME_WORDS,
        hidden_TD=rows,
    )


def decode_command(
    prefix: wire.Prefix, frame: Tensor, overflow: Tensor | None, rows: Tensor | None
) -> Command:
    """`rows` is the tensor that the prefix has announced, wherever it was found."""
    reader = wire.Reader(wire.payload_of(prefix, frame, overflow, expected=wire.Kind.COMMAND))
    operation, first, second = reader.unpack(_COUNTS)
    command: Command
    match operation:
        case _Operation.LAYERS:
            segments = _segments(reader, first)
            tokens = tuple(reader.take(np.int32, second))
            _expect("tokens", found=len(tokens), expected=_num_rows(segments))
            if min(tokens, default=0) < 0:
                raise WireError(f"found token {min(tokens)} in a command, expected 0 or more")
            _expect_something("rows to run the layers over", found=len(tokens))
            command = RunLayers(tokens=tokens, segments=segments)
        case _Operation.HEAD:
            segments = _segments(reader, first)
            input_TE = _handed_along(rows, prefix)
            _expect("rows", found=input_TE.shape[0], expected=_num_rows(segments))
            _expect_something("rows to run the head over", found=input_TE.shape[0])
            command = RunHead(segments=segments, input_TE=input_TE)
        case _Operation.LOGITS:
            exit_AD = _handed_along(rows, prefix)
            _expect_something("rows to guess after", found=exit_AD.shape[0])
            command = RunLogits(exit_AD=exit_AD)
        case _Operation.MOVE:
            _expect_something("moves", found=first)
            ends = reader.take(np.int32, 2 * first)
            if min(ends, default=0) < 0:
                raise WireError(f"found slot {min(ends)} in a KV move, expected 0 or more")
            command = MoveSlots(moves=tuple(zip(ends[::2], ends[1::2], strict=True)))
        case _Operation.TAKE_HEAD:
            command = TakeHead(folder=_text(reader, first), sha256=_text(reader, second))
        case _:
            raise WireError(
                f"found operation {operation} in a command, expected one of {list(_Operation)}"
            )
    reader.expect_end()
    return command


def _written(command: Command) -> tuple[bytes, Tensor | None]:
    """The payload, and the tensor that travels with it."""
    match command:
        case RunLayers(tokens=tokens, segments=segments):
            counts = _COUNTS.pack(_Operation.LAYERS, len(segments), len(tokens))
            return counts + _row_words(segments) + array("i", tokens).tobytes(), None
        case RunHead(segments=segments, input_TE=input_TE):
            return _COUNTS.pack(_Operation.HEAD, len(segments), 0) + _row_words(segments), input_TE
        case RunLogits(exit_AD=exit_AD):
            return _COUNTS.pack(_Operation.LOGITS, 0, 0), exit_AD
        case MoveSlots(moves=moves):
            ends = array("i", chain.from_iterable(moves))
            return _COUNTS.pack(_Operation.MOVE, len(moves), 0) + ends.tobytes(), None
        case TakeHead(folder=folder, sha256=sha256):
            texts = folder.encode(), sha256.encode()
            counts = _COUNTS.pack(_Operation.TAKE_HEAD, *(len(text) for text in texts))
            return counts + b"".join(text + bytes(-len(text) % 4) for text in texts), None


def _row_words(segments: Sequence[RowsLike]) -> bytes:
    words = array("i")
    for segment in segments:
        counts = len(segment.pages), len(segment.parents)
        words.extend((segment.start, segment.num_rows, *counts))
    for segment in segments:
        words.extend(segment.pages)
        words.extend(segment.parents)
    return words.tobytes()


def _segments(reader: wire.Reader, count: int) -> tuple[Rows, ...]:
    table = reader.take(np.int32, _COLUMNS * count)
    found: list[Rows] = []
    for at in range(0, len(table), _COLUMNS):
        start, num_rows, num_pages, num_parents = table[at : at + _COLUMNS]
        pages = tuple(reader.take(np.int32, num_pages))
        parents = tuple(reader.take(np.int32, num_parents))
        if start < 0 or num_rows < 1 or min(pages, default=0) < 0:
            raise WireError(
                f"found {num_rows} rows from place {start} on in pages from {min(pages, default=0)}"
                " in a command, expected one row or more and nothing negative"
            )
        node = first_misplaced(parents)
        if node is not None:
            raise WireError(
                f"found parent {parents[node]} of drafted row {node} in a command, expected -1 or "
                "a drafted row before it"
            )
        found.append(Rows(start=start, num_rows=num_rows, pages=pages, parents=parents))
    return tuple(found)


def _num_rows(segments: Sequence[RowsLike]) -> int:
    return sum(segment.num_rows for segment in segments)


def _handed_along(rows: Tensor | None, prefix: wire.Prefix) -> Tensor:
    if rows is None:
        raise WireError(f"found no rows beside command {prefix.round_id}, expected a matrix")
    return rows


def _text(reader: wire.Reader, size: int) -> str:
    data = bytes(reader.take(np.uint8, size + -size % 4))[:size]
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"found a text in a command that is no UTF-8: {error}") from error


def _expect_something(what: str, *, found: int) -> None:
    if found < 1:
        raise WireError(f"found {found} {what} in a command, expected one or more")


def _expect(what: str, *, found: int, expected: int) -> None:
    if found != expected:
        raise WireError(f"found {found} {what} in a command, expected {expected} as its rows say")
