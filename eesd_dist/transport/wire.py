"""How a round and its reply become bytes, and when bytes are refused.

A message is one frame of fixed size, so that a receiver can wait for it without knowing what
comes. Its first 16 words are the prefix: version, kind, generation, round, sizes, checksums. What
fits stands in the rest of the frame, since every further message costs a handshake: first the
payload (the header's fields), then hidden states and draft probabilities. What does not fit (long
prefill, wide models), or lies on a GPU, follows as tensors of its own. Everything is little-endian
int32 words; floats and 64-bit integers are bit-cast, so that every parameter arrives with the very
bits it left with.

Nothing here is pickled, nothing here sends, and nothing here knows who the peer is. A message of
another version or generation, cut short or with a wrong checksum is a WireError that says what was
found and what was expected.
"""

import ctypes
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.errors import WireError
from eesd_dist.transport.contracts import Floats, Ints, RoundHeader, Segment, VerifyReply
from eesd_dist.trees import first_misplaced
from eesd_dist.types import Traffic

# Shapes: T rows of a round, D hidden size, K drafted rows, V vocabulary.

MAGIC = 0x45455344  # "EESD"
VERSION = 4
ROUND_FRAME_WORDS = 8192
"""32 KiB: a small model's decode round, or a large one's header without its hidden states."""
REPLY_FRAME_WORDS = 1024
"""4 KiB: the reply to a thousand sampled rows; alternatives for log-probabilities may not fit."""

_PREFIX = struct.Struct("<IHHqqIIiiiiiii")
_PREFIX_CRC = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _PREFIX_CRC.size
_PAYLOAD_INLINE = 1
_TENSORS_INLINE = 2
MAX_PAYLOAD_BYTES = 1 << 28
"""Above it an announced size is a broken message rather than a large one."""
_MAX_ELEMENTS = 1 << 33

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}

# Round payload: counts | trace, span (u64) | seeds (u64) | doubles | table | token and page lists,
# and only where there are trees: number of moves, parents of each segment | moves | parents.
_COUNTS = struct.Struct("<iiii")  # segments, logit biases, flags, integers in the lists
_TRACE = struct.Struct("<QQQ")
_REPLY = struct.Struct("<dddqqiiiiii")
# Seconds: worked, received to sent, waited for other ranks; bytes to and from them; counts.
_TABLE_COLUMNS = 13
_table_row = attrgetter(
    "start", "num_rows", "num_sampled", "num_prompt", "top_k", "min_tokens"
)  # fmt: skip
_doubles = attrgetter(
    "temperature", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_NUM_DOUBLES = 6
_WANTS_REJECTION = 1
_HAS_TREES = 2
_U64 = (1 << 64) - 1


class Kind(IntEnum):
    ROUND = 1
    REPLY = 2
    CLOSE = 3
    COMMAND = 4
    """From the drafting actor to the other ranks of its stage: see `transport.commands`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """A matrix announced by a prefix."""

    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty((self.rows, self.columns), dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What a frame says of itself and of what follows it."""

    kind: Kind
    generation: int
    round_id: int
    payload_bytes: int
    payload_crc: int
    hidden: TensorShape | None
    draft_probs: TensorShape | None
    payload_is_inline: bool
    tensors_are_inline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Ready to be sent: the frame, then what did not fit in it."""

    frame: Tensor
    overflow: Tensor | None
    """The payload, when it is longer than the frame."""
    beside: tuple[Tensor, ...]
    """Hidden states and draft probabilities, unless the frame holds a copy of them."""

    @property
    def words(self) -> tuple[Tensor, ...]:
        return (self.frame,) if self.overflow is None else (self.frame, self.overflow)


def round_frame() -> Tensor:
    return torch.empty(ROUND_FRAME_WORDS, dtype=torch.int32)


def reply_frame() -> Tensor:
    return torch.empty(REPLY_FRAME_WORDS, dtype=torch.int32)


def empty_overflow(prefix: Prefix) -> Tensor | None:
    """Room for the payload that follows the frame, or None when the frame holds it."""
    if prefix.payload_is_inline:
        return None
    return torch.empty(prefix.payload_bytes // 4, dtype=torch.int32)


def encode_round(
    header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
) -> Message:
    if hidden_TD.shape[0] != header.num_rows:
        raise WireError(
            f"round {header.round_id} has {hidden_TD.shape[0]} rows of hidden states, "
            f"its segments have {header.num_rows}"
        )
    return message_of(
        Kind.ROUND,
        generation=header.generation,
        round_id=header.round_id,
        payload=_round_payload(header),
        num_words=ROUND_FRAME_WORDS,
        hidden_TD=hidden_TD,
        draft_probs_KV=draft_probs_KV,
    )


def encode_reply(reply: VerifyReply, *, generation: int) -> Message:
    tops = np.atleast_2d(reply.top_ids)
    payload = b"".join(
        (
            _REPLY.pack(
                reply.verify_s,
                reply.received_to_sent_s,
                reply.group.wait_s,
                reply.group.sent_bytes,
                reply.group.received_bytes,
                len(reply.tokens),
                len(reply.accepted),
                len(reply.logprobs),
                *tops.shape,
                0,
            ),
            _bytes(reply.tokens, np.int32),
            _bytes(reply.accepted, np.int32),
            _bytes(reply.logprobs, np.float32),
            _bytes(reply.top_ids, np.int32),
            _bytes(reply.top_logprobs, np.float32),
        )
    )
    return message_of(
        Kind.REPLY,
        generation=generation,
        round_id=reply.round_id,
        payload=payload,
        num_words=REPLY_FRAME_WORDS,
    )


def encode_close(*, generation: int) -> Message:
    """Said by the draft end, and by verify rank 0 to its followers: no more rounds."""
    return _close(generation, num_words=ROUND_FRAME_WORDS)


def encode_closed(*, generation: int) -> Message:
    """The verify end's answer to it: no more replies."""
    return _close(generation, num_words=REPLY_FRAME_WORDS)


def decode_prefix(frame: Tensor, *, generation: int) -> Prefix:
    """Reads a frame's prefix, and refuses what this version and generation cannot use."""
    words = _view(frame)
    if len(words) < PREFIX_BYTES:
        raise WireError(f"found a frame of {len(words)} bytes, expected {PREFIX_BYTES} or more")
    magic, version, kind, found, round_id, size, crc, flags, *shapes = _PREFIX.unpack_from(words)
    if magic != MAGIC:
        raise WireError(f"found magic {magic:#x}, expected {MAGIC:#x}: not one of our messages")
    if version != VERSION:
        raise WireError(
            f"found wire version {version}, expected {VERSION}: run the same release on every node"
        )
    (prefix_crc,) = _PREFIX_CRC.unpack_from(words, _PREFIX.size)
    _check("prefix checksum", found=prefix_crc, expected=zlib.crc32(words[: _PREFIX.size]))
    if found != generation:
        raise WireError(
            f"found a message of generation {found}, expected {generation}: its sender belongs to "
            "another membership and is ignored"
        )
    if size > MAX_PAYLOAD_BYTES or size % 4:
        raise WireError(f"found a payload of {size} bytes, expected whole words up to 256 MiB")
    try:
        known = Kind(kind)
    except ValueError as error:
        raise WireError(f"found message kind {kind}, expected one of {list(Kind)}") from error
    return Prefix(
        kind=known,
        generation=found,
        round_id=round_id,
        payload_bytes=size,
        payload_crc=crc,
        hidden=_shape("hidden states", *shapes[:3]),
        draft_probs=_shape("draft probabilities", *shapes[3:]),
        payload_is_inline=bool(flags & _PAYLOAD_INLINE),
        tensors_are_inline=bool(flags & _TENSORS_INLINE),
    )


def decode_round(prefix: Prefix, frame: Tensor, overflow: Tensor | None = None) -> RoundHeader:
    payload = payload_of(prefix, frame, overflow, expected=Kind.ROUND)
    reader = Reader(payload)
    num_segments, num_biases, flags, num_listed = reader.unpack(_COUNTS)
    trace_high, trace_low, span_id = reader.unpack(_TRACE)
    seeds = reader.take(np.uint64, num_segments)
    doubles = reader.take(np.float64, _NUM_DOUBLES * num_segments + num_biases)
    table = reader.take(np.int32, _TABLE_COLUMNS * num_segments)
    listed = reader.take(np.int32, num_listed)
    moves, parents = _take_trees(reader, num_segments, has_trees=bool(flags & _HAS_TREES))
    reader.expect_end()
    header = RoundHeader(
        generation=prefix.generation,
        round_id=prefix.round_id,
        segments=tuple(
            _segments(seeds, doubles, table, listed, num_biases=num_biases, parents=parents)
        ),
        trace_id=trace_high << 64 | trace_low,
        span_id=span_id,
        wants_rejection=bool(flags & _WANTS_REJECTION),
        kv_moves=moves,
    )
    num_rows = prefix.hidden.rows if prefix.hidden is not None else 0
    _check("rows of hidden states", found=num_rows, expected=header.num_rows)
    return header


def inline_tensors(prefix: Prefix, frame: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Hidden states and draft probabilities out of a frame that holds them, as tensors of their
    own: results may depend on how memory is aligned, and a frame aligns them at random."""
    start = PREFIX_BYTES + prefix.payload_bytes
    end = start
    found: list[Tensor | None] = []
    for shape in (prefix.hidden, prefix.draft_probs):
        end += 0 if shape is None else shape.size_bytes
        if end > frame.nbytes:
            raise WireError(f"found a frame of {frame.nbytes} bytes, expected {end} or more")
        found.append(
            None if shape is None else _matrix(frame, shape, offset=end - shape.size_bytes)
        )
    return found[0], found[1]


def decode_reply(prefix: Prefix, frame: Tensor, overflow: Tensor | None = None) -> VerifyReply:
    reader = Reader(payload_of(prefix, frame, overflow, expected=Kind.REPLY))
    verify_s, received_to_sent_s, wait_s, sent_bytes, received_bytes, *counts = reader.unpack(
        _REPLY
    )
    num_tokens, num_accepted, num_logprobs, top_rows, top_columns, _ = counts
    if sent_bytes < 0 or received_bytes < 0:
        raise WireError(
            f"found {sent_bytes} bytes sent and {received_bytes} received, expected 0 or more"
        )
    if top_rows < 0 or top_columns < 0:
        raise WireError(f"found {top_rows} x {top_columns} alternatives, expected counts")
    reply = VerifyReply(
        round_id=prefix.round_id,
        tokens=reader.ints(num_tokens),
        accepted=reader.ints(num_accepted),
        logprobs=reader.floats(num_logprobs),
        top_ids=reader.ints(top_rows * top_columns).reshape(top_rows, top_columns),
        top_logprobs=reader.floats(top_rows * top_columns).reshape(top_rows, top_columns),
        verify_s=verify_s,
        received_to_sent_s=received_to_sent_s,
        group=Traffic(sent_bytes=sent_bytes, received_bytes=received_bytes, wait_s=wait_s),
        wire_bytes=frame.nbytes + (0 if overflow is None else overflow.nbytes),
    )
    reader.expect_end()
    return reply


class Reader:
    """Takes a payload apart from front to back and never past its end."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._offset = 0

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return cast(tuple[int, ...], form.unpack_from(self._payload, self._advance(form.size)))

    def take(self, dtype: type[np.generic], count: int) -> list[int]:
        return cast(list[int], self._array(dtype, count).tolist())

    def ints(self, count: int) -> Ints:
        return cast(Ints, self._array(np.int32, count).copy())

    def floats(self, count: int) -> Floats:
        return cast(Floats, self._array(np.float32, count).copy())

    def _array(self, dtype: type[np.generic], count: int) -> npt.NDArray[np.generic]:
        if count < 0:
            raise WireError(f"found a count of {count} in the payload, expected 0 or more")
        size = np.dtype(dtype).itemsize * count
        return np.frombuffer(self._payload, dtype, count, self._advance(size))

    def _advance(self, size: int) -> int:
        start = self._offset
        self._offset += size
        if self._offset > len(self._payload):
            raise WireError(
                f"found a payload of {len(self._payload)} bytes, expected {self._offset} or more"
            )
        return start

    def expect_end(self) -> None:
        _check("bytes of payload", found=len(self._payload), expected=self._offset)


def _round_payload(header: RoundHeader) -> bytes:
    segments = header.segments
    table, listed = array("i"), array("i")
    doubles, seeds = array("d"), array("Q")
    biases = [bias for segment in segments for bias in segment.logit_bias]
    try:
        for segment in segments:
            table.extend(_table_row(segment))
            table.extend(_list_lengths(segment))
            doubles.extend(_doubles(segment))
            seeds.append(segment.seed)
            listed.extend(segment.pages)
            listed.extend(segment.tokens)
            if segment.history:
                listed.extend(segment.history)
            if segment.stop_token_ids:
                listed.extend(segment.stop_token_ids)
        listed.extend([token for token, _ in biases])
        doubles.extend([bias for _, bias in biases])
        trees = _tree_words(header)
        flags = (_WANTS_REJECTION if header.wants_rejection else 0) | (_HAS_TREES if trees else 0)
        counts = _COUNTS.pack(len(segments), len(biases), flags, len(listed))
        trace = _TRACE.pack(header.trace_id >> 64, header.trace_id & _U64, header.span_id)
    except (OverflowError, TypeError, struct.error) as error:
        raise WireError(
            f"round {header.round_id} has a value that does not fit its field: {error}"
        ) from error
    parts = (seeds, doubles, table, listed, trees)
    return b"".join((counts, trace, *(part.tobytes() for part in parts)))


def _tree_words(header: RoundHeader) -> "array[int]":
    """Moves and parents; nothing at all where every draft is a chain and nothing has to move."""
    words = array("i")
    if not header.kv_moves and not any(segment.parents for segment in header.segments):
        return words
    words.append(len(header.kv_moves))
    words.extend([len(segment.parents) for segment in header.segments])
    words.extend(chain.from_iterable(header.kv_moves))
    words.extend(chain.from_iterable(segment.parents for segment in header.segments))
    return words


def _take_trees(
    reader: "Reader", num_segments: int, *, has_trees: bool
) -> tuple[tuple[tuple[int, int], ...], list[tuple[int, ...]]]:
    """KV moves, and each segment's parents; of a form that the rows can be computed by."""
    if not has_trees:
        return (), [()] * num_segments
    num_moves, *counts = reader.take(np.int32, 1 + num_segments)
    ends = reader.take(np.int32, 2 * num_moves)
    if min(ends, default=0) < 0:
        raise WireError(f"found slot {min(ends)} in a KV move, expected 0 or more")
    parents = [tuple(reader.take(np.int32, count)) for count in counts]
    for tree in parents:
        node = first_misplaced(tree)
        if node is not None:
            raise WireError(
                f"found parent {tree[node]} of drafted row {node}, expected -1 for the last known "
                f"row, or a drafted row before it"
            )
    return tuple(zip(ends[::2], ends[1::2], strict=True)), parents


def _list_lengths(segment: Segment) -> tuple[int, ...]:
    wanted = segment.top_logprobs
    return (
        0 if wanted is None else 1,
        0 if wanted is None else wanted,
        len(segment.pages),
        len(segment.tokens),
        len(segment.history),
        len(segment.stop_token_ids),
        len(segment.logit_bias),
    )


def _segments(
    seeds: list[int],
    doubles: Sequence[float],
    table: list[int],
    listed: list[int],
    *,
    num_biases: int,
    parents: list[tuple[int, ...]],
) -> Iterator[Segment]:
    rows = [table[i : i + _TABLE_COLUMNS] for i in range(0, len(table), _TABLE_COLUMNS)]
    lengths = [length for row in rows for length in row[8:12]]
    if min(chain.from_iterable(row[1:4] + row[8:] for row in rows), default=0) < 0:
        raise WireError("found a negative count in a segment, expected 0 or more")
    _check("logit biases", found=sum(row[12] for row in rows), expected=num_biases)
    _check("listed integers", found=len(listed), expected=sum(lengths) + num_biases)
    bias_tokens = len(listed) - num_biases
    bias_values = len(doubles) - num_biases
    offset = 0
    for index, row in enumerate(rows):
        start, num_rows, num_sampled, num_prompt, top_k, min_tokens, wants, top_logprobs = row[:8]
        if num_sampled > num_rows:
            raise WireError(
                f"found {num_sampled} sampled rows in a segment, expected {num_rows} or fewer"
            )
        if parents[index] and len(parents[index]) != num_sampled - 1:
            raise WireError(
                f"found {len(parents[index])} parents in a segment with {num_sampled} sampled "
                "rows, expected one for each but the last known row, or none for a chain"
            )
        pages_end = offset + row[8]
        tokens_end = pages_end + row[9]
        history_end = tokens_end + row[10]
        stop_end = history_end + row[11]
        at = index * _NUM_DOUBLES
        bias_tokens_end, bias_values_end = bias_tokens + row[12], bias_values + row[12]
        yield Segment(
            start=start,
            num_rows=num_rows,
            num_sampled=num_sampled,
            pages=tuple(listed[offset:pages_end]),
            tokens=tuple(listed[pages_end:tokens_end]),
            history=tuple(listed[tokens_end:history_end]),
            num_prompt=num_prompt,
            temperature=doubles[at],
            top_p=doubles[at + 1],
            top_k=top_k,
            min_p=doubles[at + 2],
            repetition_penalty=doubles[at + 3],
            presence_penalty=doubles[at + 4],
            frequency_penalty=doubles[at + 5],
            seed=seeds[index],
            min_tokens=min_tokens,
            stop_token_ids=tuple(listed[history_end:stop_end]),
            logit_bias=tuple(
                zip(
                    listed[bias_tokens:bias_tokens_end],
                    doubles[bias_values:bias_values_end],
                    strict=True,
                )
            ),
            top_logprobs=top_logprobs if wants else None,
            parents=parents[index],
        )
        offset = stop_end
        bias_tokens, bias_values = bias_tokens_end, bias_values_end


def _close(generation: int, *, num_words: int) -> Message:
    return message_of(
        Kind.CLOSE, generation=generation, round_id=0, payload=b"", num_words=num_words
    )


def message_of(
    kind: Kind,
    *,
    generation: int,
    round_id: int,
    payload: bytes,
    num_words: int,
    hidden_TD: Tensor | None = None,
    draft_probs_KV: Tensor | None = None,
) -> Message:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"round {round_id} has a payload of {len(payload)} bytes, 256 MiB fit")
    beside = tuple(x for x in (hidden_TD, draft_probs_KV) if x is not None)
    room = 4 * num_words - PREFIX_BYTES - len(payload)
    tensors_fit = sum(x.nbytes for x in beside) <= room and not any(x.is_cuda for x in beside)
    prefix = _PREFIX.pack(
        MAGIC,
        VERSION,
        kind,
        generation,
        round_id,
        len(payload),
        zlib.crc32(payload),
        (_PAYLOAD_INLINE if room >= 0 else 0) | (_TENSORS_INLINE if tensors_fit else 0),
        *_announced(hidden_TD),
        *_announced(draft_probs_KV),
    )
    parts = [prefix, _PREFIX_CRC.pack(zlib.crc32(prefix))]
    if room >= 0:
        parts.append(payload)
    if tensors_fit:
        parts.extend(_raw(x) for x in beside)
    frame = bytearray(4 * num_words)
    inline = b"".join(parts)
    frame[: len(inline)] = inline
    return Message(
        frame=_words(frame),
        overflow=None if room >= 0 else _words(bytearray(payload)),
        beside=() if tensors_fit else tuple(x for x in beside if x.numel() > 0),
    )


def payload_of(
    prefix: Prefix, frame: Tensor, overflow: Tensor | None, *, expected: Kind
) -> memoryview:
    if prefix.kind is not expected:
        raise WireError(f"found a {prefix.kind.name} message, expected a {expected.name}")
    if prefix.payload_is_inline:
        payload = _view(frame)[PREFIX_BYTES : PREFIX_BYTES + prefix.payload_bytes]
    else:
        payload = memoryview(b"") if overflow is None else _view(overflow)
    _check("bytes of payload", found=len(payload), expected=prefix.payload_bytes)
    _check("payload checksum", found=zlib.crc32(payload), expected=prefix.payload_crc)
    return payload


def _announced(x: Tensor | None) -> tuple[int, int, int]:
    if x is None:
        return (0, 0, 0)
    code = _CODES.get(x.dtype)
    if code is None or x.dim() != 2:
        raise WireError(f"found a tensor {tuple(x.shape)} of {x.dtype}, expected floats [T, D]")
    return (x.shape[0], x.shape[1], code)


def _shape(what: str, rows: int, columns: int, code: int) -> TensorShape | None:
    if code == 0:
        return None
    if not 1 <= code <= len(_DTYPES):
        raise WireError(f"found dtype code {code} for {what}, expected 0 to {len(_DTYPES)}")
    if rows < 0 or columns < 0 or rows * columns > _MAX_ELEMENTS:
        raise WireError(f"found {rows} x {columns} {what}, expected a size that fits in memory")
    return TensorShape(rows=rows, columns=columns, dtype=_DTYPES[code - 1])


def _check(what: str, *, found: int, expected: int) -> None:
    if found != expected:
        raise WireError(f"{what}: found {found}, expected {expected}; the message is broken")


# Raw copies: a chain of views costs more than the bytes when caches are cold, as in a real round.
def _matrix(frame: Tensor, shape: TensorShape, *, offset: int) -> Tensor:
    x = torch.empty((shape.rows, shape.columns), dtype=shape.dtype)
    ctypes.memmove(x.data_ptr(), frame.data_ptr() + offset, shape.size_bytes)
    return x


def _raw(x: Tensor) -> bytes:
    """The bytes of a tensor on the CPU, whatever its type."""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _bytes(values: Ints | Floats, dtype: type[np.generic]) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()


def _words(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.int32)


def _view(words: Tensor) -> memoryview:
    return words.numpy().data.cast("B")
