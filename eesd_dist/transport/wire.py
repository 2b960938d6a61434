"""The wire format of messages between ranks: encoding, decoding and validation.

A message begins with a prefix of fixed size (`_PREFIX`) and its checksum. The payload (one
`Record`) follows, then hidden states and draft probabilities, at multiples of 64
bytes: results may depend on the alignment of memory. Tensors on a GPU follow the message over NCCL.
A record is a MessagePack array of its fields: doubles and 64-bit integers keep their bits. Arrays
and tensors are raw little-endian bytes.

Nothing here is pickled and nothing here sends. A message of another version or membership epoch,
cut short, with a wrong checksum or with a field out of its bounds is a WireError that says what was
found and what was expected. No length is trusted beyond the bytes that are there.
"""

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
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
    VerifyReply,
)
from eesd_dist.transport.link import bytes_of, new_memory
from eesd_dist.trees import first_misplaced
from eesd_dist.types import Count

# Shapes: T rows of a round, D hidden size, K drafted rows, V vocabulary.

MAGIC = 0x45455344  # "EESD"
VERSION = 13
MAX_PAYLOAD_BYTES = 1 << 28
"""A larger announced size is taken for a broken message."""
_MAX_ELEMENTS = 1 << 33

_PREFIX = struct.Struct("<IHBBqqIIBBxxIIII")
"""Magic, version, kind, 1 if the tensors are inline, epoch, round, payload bytes, payload checksum;
of hidden states and draft probabilities: index in `_DTYPE_NAMES`, then rows and columns."""
_CRC = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size + _CRC.size
_ALIGNMENT = 64

_DTYPES: Mapping[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DTYPE_NAMES: tuple[DType | None, ...] = (None, *_DTYPES)
"""None: there is no such tensor."""
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES.values(), start=1)}


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
    """Describes a message and what follows it."""

    kind: Kind
    epoch: int
    round_id: int
    payload_bytes: int
    payload_crc: int
    hidden: TensorShape | None
    draft_probs: TensorShape | None
    tensors_are_inline: bool

    @property
    def shapes(self) -> tuple[TensorShape | None, TensorShape | None]:
        return self.hidden, self.draft_probs

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Offsets of hidden states and draft probabilities, and the end of the message."""
        offsets = [PREFIX_BYTES + self.payload_bytes]
        for shape in self.shapes if self.tensors_are_inline else (None, None):
            size_bytes = 0 if shape is None else shape.size_bytes
            if size_bytes:
                offsets[-1] = _aligned(offsets[-1])
            offsets.append(offsets[-1] + size_bytes)
        first, second, end = offsets
        return first, second, end


@dataclass(frozen=True, slots=True)
class Message:
    """An encoded message, in the buffers from which it is sent."""

    buffers: tuple[memoryview, ...]
    separate: tuple[Tensor, ...] = ()
    """Tensors on a GPU that follow the message."""

    @property
    def size_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def joined(self) -> memoryview:
        """Returns a copy of the message as a receiver gets it."""
        content = new_memory(self.size_bytes)
        content[:] = b"".join(self.buffers)
        return content


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
_rounds = Decoder(RoundHeader, dec_hook=decoded)
_replies = Decoder(VerifyReply, dec_hook=decoded)


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
        hidden_TD=hidden_TD,
        draft_probs_KV=draft_probs_KV,
    )


def encode_reply(reply: VerifyReply, *, epoch: int) -> Message:
    return message_of(
        Kind.REPLY,
        epoch=epoch,
        round_id=reply.round_id,
        content=reply,
    )


def encode_close(*, epoch: int) -> Message:
    """Encodes the end of a stream of messages."""
    return message_of(Kind.CLOSE, epoch=epoch, round_id=0, content=None)


def decode_prefix(data: memoryview, *, epoch: int) -> Prefix:
    """Reads the prefix of a message. Raises WireError for another version or membership epoch, and
    for another size than the prefix says."""
    if len(data) < PREFIX_BYTES:
        raise WireError(f"found a message of {len(data)} bytes, expected {PREFIX_BYTES} or more")
    (
        magic, version, kind, is_inline, epoch_of_sender, round_id, payload_bytes, payload_crc,
        hidden_code, probs_code, *sizes,
    ) = _PREFIX.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise WireError(f"found magic {magic:#x}, expected {MAGIC:#x}: not one of our messages")
    if version != VERSION:
        raise WireError(
            f"found wire version {version}, expected {VERSION}: run the same release on every node"
        )
    (crc,) = _CRC.unpack_from(data, _PREFIX.size)
    _check("prefix checksum", actual=crc, expected=zlib.crc32(data[: _PREFIX.size]))
    if epoch_of_sender != epoch:
        raise WireError(
            f"found a message of epoch {epoch_of_sender}, expected {epoch}: its sender "
            "belongs to another membership epoch and is ignored"
        )
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(f"found a payload of {payload_bytes} bytes, expected 256 MiB or less")
    try:
        prefix = Prefix(
            kind=Kind(kind),
            epoch=epoch,
            round_id=round_id,
            payload_bytes=payload_bytes,
            payload_crc=payload_crc,
            hidden=_shape(hidden_code, *sizes[:2]),
            draft_probs=_shape(probs_code, *sizes[2:]),
            tensors_are_inline=bool(is_inline),
        )
    except (ValueError, IndexError) as error:
        raise WireError(f"found a broken prefix: {error}") from error
    _check("bytes of the message", actual=len(data), expected=prefix.offsets[-1])
    return prefix


def _shape(code: int, rows: int, columns: int) -> TensorShape | None:
    """Raises IndexError for an unknown type, and WireError for a tensor that cannot be."""
    dtype = _DTYPE_NAMES[code]
    if dtype is None:
        return None
    shape = TensorShape(rows=rows, columns=columns, dtype=dtype)
    if rows * columns > _MAX_ELEMENTS:
        raise WireError(f"found a tensor of {shape}, expected a size that fits in memory")
    return shape


def decode_round(prefix: Prefix, data: memoryview) -> RoundHeader:
    header = decode_payload(_rounds, prefix, data, expected=Kind.ROUND)
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


def inline_tensors(prefix: Prefix, data: memoryview) -> tuple[Tensor | None, Tensor | None]:
    """Returns hidden states and draft probabilities of a message that holds them, in its memory."""
    hidden, draft_probs = (
        None if shape is None else _matrix(data, shape, offset=offset)
        for shape, offset in zip(prefix.shapes, prefix.offsets[:2], strict=True)
    )
    return hidden, draft_probs


def receive_tensors(
    prefix: Prefix, data: memoryview, receive: Callable[[Tensor], Tensor], *, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Returns hidden states and draft probabilities, of the message or received after it."""
    if prefix.tensors_are_inline:
        return inline_tensors(prefix, data)
    tensors: list[Tensor | None] = []
    for shape in prefix.shapes:
        x = None if shape is None else shape.empty(device)
        tensors.append(receive(x) if x is not None and x.numel() > 0 else x)
    return tensors[0], tensors[1]


def decode_reply(prefix: Prefix, data: memoryview) -> VerifyReply:
    reply = decode_payload(_replies, prefix, data, expected=Kind.REPLY)
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
    return msgspec.structs.replace(reply, wire_bytes=data.nbytes)


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


def decode_payload(decoder: Decoder[_T], prefix: Prefix, data: memoryview, *, expected: Kind) -> _T:
    """Returns the record that a message carries, after checking its kind, size and checksum."""
    if prefix.kind is not expected:
        raise WireError(f"found a {prefix.kind.name} message, expected a {expected.name}")
    payload = data[PREFIX_BYTES : PREFIX_BYTES + prefix.payload_bytes]
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
    tensors = [x for x in (hidden_TD, draft_probs_KV) if x is not None]
    is_on_host = all(x.device == HOST for x in tensors)
    hidden_code, *hidden_size = _announced(hidden_TD)
    probs_code, *probs_size = _announced(draft_probs_KV)
    try:
        prefix = _PREFIX.pack(
            MAGIC, VERSION, kind, is_on_host, epoch, round_id, len(payload), zlib.crc32(payload),
            hidden_code, probs_code, *hidden_size, *probs_size,
        )  # fmt: skip
    except struct.error as error:
        raise WireError(
            f"{kind.name} message {round_id} has a value that does not fit its field: {error}"
        ) from error
    front = b"".join((prefix, _CRC.pack(zlib.crc32(prefix)), payload))
    buffers = [memoryview(front)]
    tensors = [x.contiguous() for x in tensors if x.numel() > 0]
    if not is_on_host:
        return Message(tuple(buffers), separate=tuple(tensors))
    size_bytes = len(front)
    for x in tensors:
        padding = _aligned(size_bytes) - size_bytes
        buffers += [memoryview(bytes(padding)), bytes_of(x)]
        size_bytes += padding + x.nbytes
    return Message(tuple(buffers))


def _announced(x: Tensor | None) -> tuple[int, int, int]:
    """Returns a tensor's type code, rows and columns, all 0 for none."""
    if x is None:
        return 0, 0, 0
    code = _CODES.get(x.dtype)
    if code is None or x.dim() != 2:
        raise WireError(f"found a tensor {tuple(x.shape)} of {x.dtype}, expected floats [T, D]")
    return code, *x.shape


def _check(what: str, *, actual: int, expected: int) -> None:
    if actual != expected:
        raise WireError(f"{what}: found {actual}, expected {expected}; the message is broken")


def _matrix(data: memoryview, shape: TensorShape, *, offset: int) -> Tensor:
    if not shape.size_bytes:
        return shape.empty(HOST)
    dtype, num_values = _DTYPES[shape.dtype], shape.rows * shape.columns
    x = torch.frombuffer(data, dtype=dtype, count=num_values, offset=offset)
    return x.view(shape.rows, shape.columns)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
