"""Ids of the events of a stream, with which a client resumes it at any ingress.

An id holds what was drawn for the stream, and how much of each choice the client has been shown:
enough to compute the same text again and to send the rest. Its MAC binds it to the API key, the
endpoint, the served model and the body of the request. Nothing else remembers it.
"""

import binascii
import hashlib
import hmac
import json
import re
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eesd_dist.errors import RequestError
from serve_app.openai.context import LAST_EVENT_ID_HEADER, NONCE_BYTES, RequestContext
from serve_app.openai.keys import Permit
from serve_app.openai.schema import REQUEST_ID_PATTERN, GenerationFields

EVENT_KEY_BYTES = 32
"""Size of a key that is drawn, where no API key is configured."""
MAX_ID_CHARS = 128
_VERSION = 2
_ORIGIN = struct.Struct(f"<BB{NONCE_BYTES}sQQ")
"""Version, number of characters of the request id that follows, nonce, seed, time."""
_POSITION_BYTES = 8
_MAC_BYTES = 16
_OVER = 1 << 31
"""Flag of a choice that is over, in its number of tokens."""
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN.encode())
_TO_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class Shown(NamedTuple):
    """The part of one choice that a client has been shown."""

    num_tokens: int = 0
    num_chars: int = 0
    """Characters shown, without an echoed prompt."""
    is_over: bool = False
    """True if its finish reason was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Values that are drawn when a stream begins, and stay the same wherever it is resumed."""

    seed: int
    """64 bits; a seed in the body overrides it."""
    nonce: bytes
    created_unix_s: int
    request_id: str
    """Value of the header X-Request-Id, at most `MAX_ID_CHARS` ASCII characters; empty: not
    needed."""

    def packed(self) -> bytes:
        name = self.request_id.encode("ascii")
        seed = self.seed % 2**64
        return _ORIGIN.pack(_VERSION, len(name), self.nonce, seed, self.created_unix_s) + name


class EventIds:
    """The ids of one stream's events."""

    def __init__(
        self, origin: Origin, shown: Sequence[Shown], *, key: bytes, digest: bytes
    ) -> None:
        self._origin = origin.packed()
        self._secret = _secret(self._origin, key=key, digest=digest)
        self._positions = [value for choice in shown for value in _position(choice)]
        self._layout = struct.Struct(f"<{len(self._positions)}I")

    def after(self, index: int, shown: Shown) -> bytes:
        """Returns the id of an event after which this much of the choice has been shown."""
        self._positions[2 * index : 2 * index + 2] = _position(shown)
        positions = self._layout.pack(*self._positions)
        return _encoded(self._origin + positions + _mac(self._secret, positions))


class WrongEventId(RequestError):
    """Refusal with one message for all reasons: it says nothing about streams of other keys."""

    def __init__(self) -> None:
        super().__init__(
            f"{LAST_EVENT_ID_HEADER}: found an id that does not belong to this request, expected "
            "the last one that was received for the same body (request_id included) at the same "
            "endpoint with the same API key, or without a key since the service was started: send "
            "it unchanged, or begin a new stream without it",
            param=LAST_EVENT_ID_HEADER,
        )


def opened(
    event_id: str, *, key: bytes, digest: bytes, num_choices: int
) -> tuple[Origin, tuple[Shown, ...]]:
    """Returns what an id holds. Raises WrongEventId unless this service has made it with this key
    for a request with this digest."""
    num_positions = num_choices * _POSITION_BYTES
    raw = _decoded(event_id, max_bytes=_num_bytes(MAX_ID_CHARS, num_choices))
    if len(raw) < _ORIGIN.size or len(raw) != _num_bytes(raw[1], num_choices):
        raise WrongEventId
    packed, mac = raw[: -_MAC_BYTES - num_positions], raw[-_MAC_BYTES:]
    positions = raw[len(packed) : -_MAC_BYTES]
    expected = _mac(_secret(packed, key=key, digest=digest), positions)
    version, _, nonce, seed, created_unix_s = _ORIGIN.unpack_from(packed)
    if not hmac.compare_digest(mac, expected) or version != _VERSION:
        raise WrongEventId
    name = packed[_ORIGIN.size :]
    if name and not _REQUEST_ID.fullmatch(name):
        raise WrongEventId
    request_id = name.decode("ascii")
    values = struct.unpack(f"<{2 * num_choices}I", positions)
    shown = tuple(
        Shown(tokens & ~_OVER, chars, bool(tokens & _OVER))
        for tokens, chars in zip(values[::2], values[1::2], strict=True)
    )
    origin = Origin(seed=seed, nonce=nonce, created_unix_s=created_unix_s, request_id=request_id)
    return origin, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    """The point at which an answer begins, or a stream is resumed."""

    origin: Origin
    shown: tuple[Shown, ...]
    """The part of each choice that the client has."""
    event_ids: EventIds | None
    """None where the events have no ids."""
    resumption: int
    """0 for an answer that begins; larger for each resumption of a stream."""


class StreamStarts:
    """Begins the answers of one model, and resumes its streams."""

    def __init__(
        self,
        *,
        model: str,
        key: bytes,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(48),
    ) -> None:
        """Event ids of another `key` are refused."""
        self._model = model
        self._key = key
        self._draw_seed = draw_seed

    def start(
        self, fields: GenerationFields, context: RequestContext, *, num_choices: int
    ) -> StreamStart:
        """Raises RequestError for an event id that this stream does not have."""
        event_id = context.last_event_id
        if event_id is not None and not fields.stream:
            raise RequestError(
                f"{LAST_EVENT_ID_HEADER}: found it with stream: false, expected it only where a "
                "stream is resumed: leave it out, or set stream: true",
                param=LAST_EVENT_ID_HEADER,
            )
        if not fields.stream or not (context.sends_event_ids or event_id is not None):
            origin, shown = self._new(fields, context), (Shown(),) * num_choices
            return StreamStart(origin=origin, shown=shown, event_ids=None, resumption=0)
        key = self._key_of(context.permit)
        digest = digest_of(fields, model=self._model)
        if event_id is None:
            origin, shown = self._new(fields, context), (Shown(),) * num_choices
        else:
            origin, shown = opened(event_id, key=key, digest=digest, num_choices=num_choices)
        return StreamStart(
            origin=origin,
            shown=shown,
            event_ids=EventIds(origin, shown, key=key, digest=digest),
            resumption=0 if event_id is None else time.time_ns(),
        )

    def _new(self, fields: GenerationFields, context: RequestContext) -> Origin:
        return Origin(
            seed=self._draw_seed(),
            nonce=context.nonce,
            created_unix_s=int(time.time()),
            request_id="" if fields.request_id else context.request_id or "",
        )

    def _key_of(self, permit: Permit | None) -> bytes:
        """Callers cannot resume each other's streams."""
        if permit is None:
            return self._key
        return hmac.digest(self._key, permit.key.name.encode(), "sha256")


def digest_of(fields: GenerationFields, *, model: str) -> bytes:
    """Returns a digest of a body as it was understood: spaces, the order of keys, nulls and
    defaults that are spelt out do not change it, nor does the flush interval."""
    body = fields.model_dump(exclude={"prompt": True, "stream_options": {"flush_interval_s"}})
    content = [fields.kind, model, body]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    # Three times faster than JSON for a long list of token ids.
    digest.update(repr(getattr(fields, "prompt", "")).encode())
    return digest.digest()


def _secret(origin: bytes, *, key: bytes, digest: bytes) -> bytes:
    """Returns the secret of one stream, so that each of its ids costs one short MAC."""
    return hmac.digest(key, origin + digest, "sha256")


def _mac(secret: bytes, positions: bytes) -> bytes:
    return hmac.digest(secret, positions, "sha256")[:_MAC_BYTES]


def _position(shown: Shown) -> tuple[int, int]:
    return shown.num_tokens | (_OVER if shown.is_over else 0), shown.num_chars


def _num_bytes(num_id_chars: int, num_choices: int) -> int:
    return _ORIGIN.size + num_id_chars + num_choices * _POSITION_BYTES + _MAC_BYTES


def _encoded(raw: bytes) -> bytes:
    return binascii.b2a_base64(raw, newline=False).translate(_TO_URL_SAFE).rstrip(b"=")


def _decoded(event_id: str, *, max_bytes: int) -> bytes:
    """Raises WrongEventId for all but the one spelling that `_encoded` gives."""
    if len(event_id) > -(-max_bytes * 4 // 3) or not event_id.isascii():
        raise WrongEventId
    padded = event_id.replace("-", "+").replace("_", "/") + "=" * (-len(event_id) % 4)
    try:
        raw = binascii.a2b_base64(padded)
    except binascii.Error as error:
        raise WrongEventId from error
    if _encoded(raw) != event_id.encode():
        raise WrongEventId
    return raw
