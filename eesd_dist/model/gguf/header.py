"""Reads the header of a GGUF file: metadata, and where each tensor is.

The file may be cut short, foreign or hostile: every length is compared with what is left of the
file before anything of that length is made, and tensors must lie in the file and not overlap, so
that what is read is at most the file. Reads no weights and does not depend on the model.
Format: ggml/docs/gguf.md of llama.cpp, versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

from eesd_dist.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS: Mapping[int, str] = {
    **dict(enumerate("BbHhIif?")),
    **dict(enumerate("Qqd", start=10)),
}
"""Formats of numbers by the type's number; the three others are strings, arrays and unknown."""
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 22
"""Entries of an array; the largest vocabularies have a sixteenth of that."""
_MAX_TEXT_BYTES = 1 << 24
_MAX_DIMS = 4
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Name, weights per block and bytes per block of each supported type, by its number."""

Metadata = Mapping[str, object]
"""Numbers, flags, texts, and lists of them, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Sizes in torch's order: rows first."""
    start: int
    """Byte in the file."""
    num_bytes: int

    @property
    def num_weights(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Metadata and tensors of a file."""

    metadata: Metadata
    tensors: Mapping[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Raises CheckpointError for a file that cannot be read whole, or with unsupported tensors."""
    try:
        with file.open("rb") as stream:
            if not file.stat().st_size:
                raise CheckpointError(file=file, found="an empty file", expected="a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(file, content).header()
    except OSError as error:
        raise CheckpointError(
            file=file, found=f"an unreadable file ({error.strerror})", expected="a GGUF file"
        ) from error


class _Reader:
    """Reads the content from its start on."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file = file
        self._content = content
        self._at = 0

    def header(self) -> Header:
        if self._content[:4] != _MAGIC:
            self._refuse(f"a file that begins with {self._content[:4]!r}", "a GGUF file")
        self._at = 4
        version = self._integer("I")
        if version not in _VERSIONS:
            self._refuse(f"GGUF version {version}", "version 2 or 3, little-endian")
        num_tensors, num_entries = self._integer("Q"), self._integer("Q")
        # The smallest entry is a name of no length, a type and a byte.
        self._require(num_entries * 13 + num_tensors * 24)
        metadata: dict[str, object] = {}
        for _ in range(num_entries):
            name = self._text()
            if name in metadata:
                self._refuse(f"{name} twice", "names that differ")
            metadata[name] = self._content_of(self._integer("I"), name)
        tensors = [self._tensor() for _ in range(num_tensors)]
        return Header(metadata=metadata, tensors=self._placed(tensors, metadata))

    def _content_of(self, type_number: int, name: str) -> object:
        if type_number == _STRING:
            return self._text()
        if type_number == _ARRAY:
            return self._array(name)
        return self._number(self._format(type_number, name))

    def _array(self, name: str) -> list[object]:
        type_number, count = self._integer("I"), self._integer("Q")
        if count > _MAX_ITEMS:
            self._refuse(f"{name} of {count} entries", f"at most {_MAX_ITEMS}")
        if type_number == _STRING:
            self._require(8 * count)
            return [self._text() for _ in range(count)]
        form = self._format(type_number, name)
        size = struct.calcsize(f"<{form}")
        return list(struct.unpack(f"<{count}{form}", self._bytes(count * size)))

    def _format(self, type_number: int, name: str) -> str:
        if type_number not in _FORMATS:
            self._refuse(f"{name} of type {type_number}", "a number, text, or array of these")
        return _FORMATS[type_number]

    def _tensor(self) -> StoredTensor:
        """Returns a tensor with its start relative to that of the data."""
        name, num_dims = self._text(), self._integer("I")
        if not 0 < num_dims <= _MAX_DIMS:
            self._refuse(f"{name} of {num_dims} dimensions", f"1 to {_MAX_DIMS}")
        shape = tuple(reversed(struct.unpack(f"<{num_dims}Q", self._bytes(8 * num_dims))))
        type_number, start = self._integer("I"), self._integer("Q")
        if type_number not in _TYPES:
            names = ", ".join(name for name, _, _ in _TYPES.values())
            self._refuse(f"{name} of type {type_number}", f"one of {names}")
        type_name, block, block_bytes = _TYPES[type_number]
        if 0 in shape or shape[-1] % block:
            self._refuse(f"{name} of shape {shape}", f"rows of whole {type_name} blocks of {block}")
        return StoredTensor(
            name=name,
            type=type_name,
            shape=shape,
            start=start,
            num_bytes=prod(shape) // block * block_bytes,
        )

    def _placed(
        self, tensors: list[StoredTensor], metadata: Metadata
    ) -> Mapping[str, StoredTensor]:
        """Returns the tensors with their starts in the file, by name."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._refuse(f"general.alignment {alignment!r}", "a power of two")
        data = -(-self._at // alignment) * alignment
        tensors_by_name: dict[str, StoredTensor] = {}
        end = data
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            start = data + tensor.start
            if tensor.name in tensors_by_name or start < end:
                self._refuse(f"{tensor.name} over another tensor", "a place for each tensor")
            end = start + tensor.num_bytes
            if end > len(self._content):
                self._refuse(
                    f"{len(self._content)} bytes, of which {tensor.name} has the last {end}",
                    "a complete file",
                )
            tensors_by_name[tensor.name] = StoredTensor(
                name=tensor.name,
                type=tensor.type,
                shape=tensor.shape,
                start=start,
                num_bytes=tensor.num_bytes,
            )
        return tensors_by_name

    def _text(self) -> str:
        size = self._integer("Q")
        if size > _MAX_TEXT_BYTES:
            self._refuse(f"a text of {size} bytes", f"at most {_MAX_TEXT_BYTES}")
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError as error:
            self._refuse(f"a text that is not UTF-8 ({error.reason})", "UTF-8")

    def _integer(self, form: str) -> int:
        return int(self._number(form))

    def _number(self, form: str) -> int | float | bool:
        content = self._bytes(struct.calcsize(f"<{form}"))
        number: int | float | bool = struct.unpack(f"<{form}", content)[0]
        return number

    def _bytes(self, count: int) -> bytes:
        self._require(count)
        self._at += count
        return self._content[self._at - count : self._at]

    def _require(self, count: int) -> None:
        if count > len(self._content) - self._at:
            self._refuse(
                f"{len(self._content)} bytes, and {count} more from byte {self._at} on are needed",
                "a complete file",
            )

    def _refuse(self, content: str, expected: str) -> NoReturn:
        raise CheckpointError(
            file=self._file,
            found=content[:300],
            expected=expected,
            advice="copy it again, if it should be a GGUF model",
        )
