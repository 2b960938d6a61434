"""The wire format of messages between ranks: encoding, decoding and validation.

A message is one frame of fixed size, so that a receiver can start a receive for it in advance. The
frame begins with a prefix of fixed size: magic, version, and a `Prefix` with its checksum. The rest
of the frame holds what fits, since every further message costs a handshake: first the payload (one
`Record`), then hidden states and draft probabilities. What does not fit (long prefill, wide
models), or is on a GPU, follows as separate tensors. A record is a MessagePack array of its fields:
doubles and 64-bit integers keep their bits. Arrays and tensors are raw little-endian bytes.

Nothing here is pickled and nothing here sends. A message of another version or membership epoch,
cut short, with a wrong checksum or with a field out of its bounds is a WireError that says what was
found and what was expected. No length is trusted beyond the bytes that are there.
"""

import ctypes
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta
from msgspec.msgpack import Decoder, Encoder
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.devices import HOST
from eesd_dist.errors import WireError
from eesd_dist.page_table import PageTable
from eesd_dist.transport.contracts import (
    Doubles,
    Ints,
    Parents,
    Record,
    RoundHeader,
    RowFeatures,
    Segment,
    Unsigned,
    VerifyReply,
)
from eesd_dist.trees import first_misplaced
from eesd_dist.types import Count

# Shapes: T rows of a round, D hidden size, K drafted rows, V vocabulary.

MAGIC = 0x45455344  # "EESD"
VERSION = 11
ROUND_FRAME_BYTES = 32 << 10
"""Holds a small model's decode round, or a large one's header without its hidden states."""
REPLY_FRAME_BYTES = 4 << 10
"""Holds the reply to 900 sampled rows; alternatives for log-probabilities may not fit."""
MAX_PAYLOAD_BYTES = 1 << 28
"""A larger announced size is taken for a broken message."""
_MAX_ELEMENTS = 1 << 33

_FRONT = struct.Struct("<IHH84s")  # magic, version, bytes of the prefix, the prefix padded
_CRC = struct.Struct("<I")
PREFIX_BYTES = _FRONT.size + _CRC.size

_DTYPES: Mapping[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Kind(IntEnum):
    ROUND = 1
    REPLY = 2
    CLOSE = 3
    COMMAND = 4
    """Message from the drafting actor to the other ranks of its stage: see `transport.commands`."""
    PAGES = 5
    """Message from a rank to its peer rank in another pipeline: see `transport.page_wire`."""


class TensorShape(Record, frozen=True, kw_only=True):
    """Shape and type of a matrix, announced in a prefix."""

    rows: Count
    columns: Count
    dtype: DType

    @property
    def size_bytes(self) -> int:
        return self.rows * self.columns * _DTYPES[self.dtype].itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty((self.rows, self.columns), dtype=_DTYPES[self.dtype], device=device)


class Prefix(Record, frozen=True, kw_only=True):
    """Describes a frame and what follows it."""

    kind: Kind
    epoch: int
    round_id: int
    payload_bytes: Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
    payload_crc: Unsigned
    hidden: TensorShape | None
    draft_probs: TensorShape | None
    payload_is_inline: bool
    tensors_are_inline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An encoded message: the frame, then what did not fit in it."""

    frame: Tensor
    overflow: Tensor | None
    """The payload, when the frame cannot hold it."""
    separate: tuple[Tensor, ...]
    """Hidden states and draft probabilities, when the frame holds no copy of them."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.frame,) if self.overflow is None else (self.frame, self.overflow)


class _Array(Record, frozen=True):
    """A NumPy array in a record."""

    dtype: str
    shape: tuple[Count, ...]
    data: bytes


def _encoded(x: object) -> _Array | bytes | None:
    """Encodes types that MessagePack lacks: arrays as records, page tables as bytes; tensors as
    None, since they travel outside of the payload."""
    if isinstance(x, PageTable):
        return x.to_bytes()
    if isinstance(x, np.ndarray):
        return _Array(x.dtype.str, x.shape, x.tobytes())
    if isinstance(x, Tensor):
        return None
    raise TypeError(f"a {type(x).__name__} cannot travel")


def decoded(kind: Any, encoded: object) -> object:
    """Decodes what `_encoded` encodes, as msgspec's hook for the annotated type."""
    if kind is PageTable:
        if not isinstance(encoded, bytes):
            raise ValueError(f"Expected pages as bytes, got {type(encoded).__name__}")
        return PageTable.from_bytes(encoded)
    array = msgspec.convert(encoded, _Array)
    expected = "<i4" if kind == Ints else "<f8" if kind == Doubles else "<f4"
    if array.dtype != expected:
        raise ValueError(f"Expected `array` of {expected}, got {array.dtype}")
    return np.frombuffer(array.data, expected).reshape(array.shape)


_encoder = Encoder(enc_hook=_encoded)
_prefixes = Decoder(Prefix)
_rounds = Decoder(RoundHeader, dec_hook=decoded)
_replies = Decoder(VerifyReply, dec_hook=decoded)


def round_frame() -> Tensor:
    return torch.empty(ROUND_FRAME_BYTES, dtype=torch.uint8)


def reply_frame() -> Tensor:
    return torch.empty(REPLY_FRAME_BYTES, dtype=torch.uint8)


def empty_overflow(prefix: Prefix) -> Tensor | None:
    """Returns a buffer for the payload that follows the frame, or None when the frame holds it."""
    if prefix.payload_is_inline:
        return None
    return torch.empty(prefix.payload_bytes, dtype=torch.uint8)


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
        epoch=header.epoch,
        round_id=header.round_id,
        content=header,
        frame_bytes=ROUND_FRAME_BYTES,
        hidden_TD=hidden_TD,
        draft_probs_KV=draft_probs_KV,
    )


def encode_reply(reply: VerifyReply, *, epoch: int) -> Message:
    return message_of(
        Kind.REPLY,
        epoch=epoch,
        round_id=reply.round_id,
        content=reply,
        frame_bytes=REPLY_FRAME_BYTES,
    )


def encode_close(*, epoch: int, frame_bytes: int = ROUND_FRAME_BYTES) -> Message:
    """Encodes the end of the stream of rounds or, in a frame of a reply's size, of replies."""
    return message_of(Kind.CLOSE, epoch=epoch, round_id=0, content=None, frame_bytes=frame_bytes)


def decode_prefix(frame: Tensor, *, epoch: int) -> Prefix:
    """Reads a frame's prefix. Raises WireError for another version or membership epoch."""
    data = _view(frame)
    if len(data) < PREFIX_BYTES:
        raise WireError(f"found a frame of {len(data)} bytes, expected {PREFIX_BYTES} or more")
    magic, version, size, fields = _FRONT.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"found magic {magic:#x}, expected {MAGIC:#x}: not one of our messages")
    if version != VERSION:
        raise WireError(
            f"found wire version {version}, expected {VERSION}: run the same release on every node"
        )
    (crc,) = _CRC.unpack_from(data, _FRONT.size)
    _check("prefix checksum", actual=crc, expected=zlib.crc32(data[: _FRONT.size]))
    prefix = _decoded(_prefixes, fields[:size], "prefix")
    if prefix.epoch != epoch:
        raise WireError(
            f"found a message of epoch {prefix.epoch}, expected {epoch}: its sender "
            "belongs to another membership epoch and is ignored"
        )
    for shape in (prefix.hidden, prefix.draft_probs):
        if shape is not None and shape.rows * shape.columns > _MAX_ELEMENTS:
            raise WireError(f"found a tensor of {shape}, expected a size that fits in memory")
    return prefix


def decode_round(prefix: Prefix, frame: Tensor, overflow: Tensor | None = None) -> RoundHeader:
    header = decode_payload(_rounds, prefix, frame, overflow, expected=Kind.ROUND)
    _check("epoch of the header", actual=header.epoch, expected=prefix.epoch)
    _check("round of the header", actual=header.round_id, expected=prefix.round_id)
    for segment in header.segments:
        _check_segment(segment)
    num_rows = prefix.hidden.rows if prefix.hidden is not None else 0
    _check("rows of hidden states", actual=num_rows, expected=header.num_rows)
    return header


def _check_segment(segment: Segment) -> None:
    if segment.num_sampled > segment.num_rows:
        raise WireError(
            f"found {segment.num_sampled} sampled rows in a segment, expected {segment.num_rows} "
            "or fewer"
        )
    if segment.masks and len(segment.masks) % max(segment.num_sampled, 1):
        raise WireError(
            f"found {len(segment.masks)} bytes of masks in a segment with {segment.num_sampled} "
            "sampled rows, expected as many for each"
        )
    if len(segment.forced) + segment.num_sampled > segment.num_rows:
        raise WireError(
            f"found {len(segment.forced)} forced and {segment.num_sampled} sampled rows in a "
            f"segment, expected {segment.num_rows} or fewer together"
        )
    if not segment.parents:
        return
    if len(segment.parents) != segment.num_sampled - 1:
        raise WireError(
            f"found {len(segment.parents)} parents in a segment with {segment.num_sampled} sampled "
            "rows, expected one for each but the last known row, or none for a chain"
        )
    check_tree(segment.parents)


def check_tree(parents: Parents) -> None:
    node = first_misplaced(parents)
    if node is not None:
        raise WireError(
            f"found parent {parents[node]} of drafted row {node}, expected -1 for the last known "
            "row, or a drafted row before it"
        )


def inline_tensors(prefix: Prefix, frame: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Copies hidden states and draft probabilities out of a frame that holds them. Not views:
    results may depend on memory alignment, and their alignment in a frame is arbitrary."""
    start = PREFIX_BYTES + prefix.payload_bytes
    end = start
    tensors: list[Tensor | None] = []
    for shape in (prefix.hidden, prefix.draft_probs):
        end += 0 if shape is None else shape.size_bytes
        if end > frame.nbytes:
            raise WireError(f"found a frame of {frame.nbytes} bytes, expected {end} or more")
        tensors.append(
            None if shape is None else _matrix(frame, shape, offset=end - shape.size_bytes)
        )
    return tensors[0], tensors[1]


def receive_tensors(
    prefix: Prefix, frame: Tensor, receive: Callable[[Tensor], Tensor], *, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Returns hidden states and draft probabilities, from the frame or received after it."""
    if prefix.tensors_are_inline:
        return inline_tensors(prefix, frame)
    tensors: list[Tensor | None] = []
    for shape in (prefix.hidden, prefix.draft_probs):
        x = None if shape is None else shape.empty(device)
        tensors.append(receive(x) if x is not None and x.numel() > 0 else x)
    return tensors[0], tensors[1]


def decode_reply(prefix: Prefix, frame: Tensor, overflow: Tensor | None = None) -> VerifyReply:
    reply = decode_payload(_replies, prefix, frame, overflow, expected=Kind.REPLY)
    _check("round of the reply", actual=reply.round_id, expected=prefix.round_id)
    for name in ("tokens", "accepted", "logprobs"):
        _check(f"dimensions of {name}", actual=getattr(reply, name).ndim, expected=1)
    if reply.top_ids.ndim != 2 or reply.top_ids.shape != reply.top_logprobs.shape:
        raise WireError(
            f"found {reply.top_ids.shape} alternatives with {reply.top_logprobs.shape} "
            "log-probabilities, expected one for each, [rows, alternatives]"
        )
    if reply.features is not None:
        _check_features(reply.features)
    size_bytes = frame.nbytes + (0 if overflow is None else overflow.nbytes)
    return msgspec.structs.replace(reply, wire_bytes=size_bytes)


def _check_features(features: RowFeatures) -> None:
    _check("dimensions of lse", actual=features.lse.ndim, expected=1)
    (num_rows,) = features.lse.shape
    if features.top_ids.ndim != 2 or features.top_ids.shape != features.top_logits.shape:
        raise WireError(
            f"found features with {features.top_ids.shape} tokens and {features.top_logits.shape} "
            "logits, expected one for each, [rows, tokens]"
        )
    _check("rows of best tokens", actual=features.top_ids.shape[0], expected=num_rows)
    for hidden_RD in features.hidden:
        _check("dimensions of hidden states", actual=hidden_RD.ndim, expected=2)
        _check("rows of hidden states", actual=hidden_RD.shape[0], expected=num_rows)


_T = TypeVar("_T")


def decode_payload(
    decoder: Decoder[_T], prefix: Prefix, frame: Tensor, overflow: Tensor | None, *, expected: Kind
) -> _T:
    """Returns the record that a message carries, after checking its kind, size and checksum."""
    if prefix.kind is not expected:
        raise WireError(f"found a {prefix.kind.name} message, expected a {expected.name}")
    if prefix.payload_is_inline:
        payload = _view(frame)[PREFIX_BYTES : PREFIX_BYTES + prefix.payload_bytes]
    else:
        payload = memoryview(b"") if overflow is None else _view(overflow)
    _check("bytes of payload", actual=len(payload), expected=prefix.payload_bytes)
    _check("payload checksum", actual=zlib.crc32(payload), expected=prefix.payload_crc)
    return _decoded(decoder, payload, f"{expected.name} message {prefix.round_id}")


def _decoded(decoder: Decoder[_T], data: bytes | memoryview, what: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"found a broken {what}: {error}") from error


def message_of(
    kind: Kind,
    *,
    epoch: int,
    round_id: int,
    content: Record | None,
    frame_bytes: int,
    hidden_TD: Tensor | None = None,
    draft_probs_KV: Tensor | None = None,
) -> Message:
    try:
        payload = b"" if content is None else _encoder.encode(content)
    except (OverflowError, TypeError) as error:
        raise WireError(
            f"{kind.name} message {round_id} has a value that does not fit its field: {error}"
        ) from error
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"round {round_id} has a payload of {len(payload)} bytes, 256 MiB fit")
    separate = tuple(x for x in (hidden_TD, draft_probs_KV) if x is not None)
    room = frame_bytes - PREFIX_BYTES - len(payload)
    is_on_host = all(x.device == HOST for x in separate)
    tensors_fit = is_on_host and sum(x.nbytes for x in separate) <= room
    prefix = Prefix(
        kind=kind,
        epoch=epoch,
        round_id=round_id,
        payload_bytes=len(payload),
        payload_crc=zlib.crc32(payload),
        hidden=_announced(hidden_TD),
        draft_probs=_announced(draft_probs_KV),
        payload_is_inline=room >= 0,
        tensors_are_inline=tensors_fit,
    )
    chunks = [_front(prefix)]
    if room >= 0:
        chunks.append(payload)
    if tensors_fit:
        chunks.extend(_raw(x) for x in separate)
    frame = bytearray(frame_bytes)
    inline = b"".join(chunks)
    frame[: len(inline)] = inline
    return Message(
        frame=_tensor(frame),
        overflow=None if room >= 0 else _tensor(bytearray(payload)),
        separate=() if tensors_fit else tuple(x for x in separate if x.numel() > 0),
    )


def _front(prefix: Prefix) -> bytes:
    fields = _encoder.encode(prefix)
    front = _FRONT.pack(MAGIC, VERSION, len(fields), fields)
    return front + _CRC.pack(zlib.crc32(front))


def _announced(x: Tensor | None) -> TensorShape | None:
    if x is None:
        return None
    dtype = _DTYPE_NAMES.get(x.dtype)
    if dtype is None or x.dim() != 2:
        raise WireError(f"found a tensor {tuple(x.shape)} of {x.dtype}, expected floats [T, D]")
    return TensorShape(rows=x.shape[0], columns=x.shape[1], dtype=dtype)


def _check(what: str, *, actual: int, expected: int) -> None:
    if actual != expected:
        raise WireError(f"{what}: found {actual}, expected {expected}; the message is broken")


# Raw copies: with cold caches, as in a real round, a chain of views costs more than the copy.
def _matrix(frame: Tensor, shape: TensorShape, *, offset: int) -> Tensor:
    x = shape.empty(torch.device("cpu"))
    ctypes.memmove(x.data_ptr(), frame.data_ptr() + offset, shape.size_bytes)
    return x


def _raw(x: Tensor) -> bytes:
    """Returns the bytes of a tensor on the CPU, of any type."""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _view(x: Tensor) -> memoryview:
    return x.numpy().data
