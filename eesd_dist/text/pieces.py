"""The bytes of each token.

Derived from the decoder in tokenizer.json. Llama-family tokenizers are of two kinds: byte-level BPE
(Llama 3, Qwen), where every character of a token stands for a byte, and SentencePiece with byte
fallback (Llama 1 and 2, Mistral), where a token is text with a marker for the space, or one raw
byte `<0x..>`. A token's bytes never depend on its neighbours, so incremental decoding is exact; a
run of raw bytes is read as a whole. Other decoders are refused.

A token that was added to a byte-level vocabulary is text as it is written, also with letters that
stand for bytes in the other tokens.
"""

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

from eesd_dist.errors import CheckpointError

_Utf8 = codecs.getincrementaldecoder("utf-8")
_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 maps to itself, the rest to above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    itself = {chr(byte): byte for byte in printable}
    return itself | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Converts vocabulary entries to bytes."""

    kind: Literal["byte-level", "sentencepiece"]
    replacements: tuple[tuple[str, str], ...] = ()
    """Replacements of SentencePiece decoders, mainly of the marker for the space."""
    has_raw_bytes: bool = False
    """True if `<0x..>` entries are bytes."""
    strips_first_space: bool = False
    """True if the first space of a full text is removed."""

    @classmethod
    def of_decoder(cls, decoder: object, *, file: object) -> Self:
        """Reads `decoder`, the section of that name in tokenizer.json. Raises CheckpointError."""
        steps = list(_decoder_steps(decoder))
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" in kinds:
            return cls(kind="byte-level")
        if "ByteFallback" not in kinds and "Metaspace" not in kinds:
            raise CheckpointError(
                file=file,
                found=f"a decoder of {kinds or 'no kind'}",
                expected="ByteLevel, or ByteFallback or Metaspace as Llama-family tokenizers have",
            )
        return cls(
            kind="sentencepiece",
            replacements=tuple(_replacements(steps)),
            has_raw_bytes="ByteFallback" in kinds,
            strips_first_space=any(_strips(step) for step in steps),
        )

    def is_raw_byte(self, entry: str) -> bool:
        return self.has_raw_bytes and _RAW_BYTE.fullmatch(entry) is not None

    def bytes_of(self, entry: str, *, is_literal: bool = False) -> bytes:
        if self.kind == "byte-level":
            return entry.encode() if is_literal else _byte_level(entry)
        raw = _RAW_BYTE.fullmatch(entry) if self.has_raw_bytes else None
        if raw:
            return bytes([int(raw[1], 16)])
        for old, new in self.replacements:
            entry = entry.replace(old, new)
        return entry.encode()


def text_of_raw_bytes(run: bytes, *, may_continue: bool = False) -> str:
    """Returns the text of a run of `<0x..>` tokens: U+FFFD for each of them if they are not UTF-8.

    With `may_continue`, an incomplete character at the end is left out."""
    try:
        return _Utf8().decode(run, final=not may_continue)
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _byte_level(entry: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in entry)
    except KeyError:
        # Plain text, as added tokens are that a vocabulary lists among its own.
        return entry.encode()


def _decoder_steps(decoder: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        return
    if decoder.get("type") == "Sequence":
        for step in cast("Sequence[object]", decoder.get("decoders", ())):
            yield from _decoder_steps(step)
    else:
        yield decoder


def _replacements(steps: Sequence[Mapping[str, object]]) -> Iterator[tuple[str, str]]:
    for step in steps:
        pattern = step.get("pattern")
        if step.get("type") == "Replace" and isinstance(pattern, Mapping) and "String" in pattern:
            yield str(pattern["String"]), str(step["content"])
        if step.get("type") == "Metaspace":
            yield str(step["replacement"]), " "


def _strips(step: Mapping[str, object]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1
