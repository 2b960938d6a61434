"""Facts of one HTTP request that its body does not have, and the headers that hold them.

Built once, where a request arrives, and passed down unchanged. A header that is read behind the
gate is one entry of `HEADERS` and one field of `RequestContext`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from eesd_dist.errors import RequestError
from serve_app.openai.keys import Permit
from serve_app.openai.schema import REQUEST_ID_PATTERN
from serve_app.openai.workloads import WORKLOAD_HEADER, WORKLOAD_PATTERN, checked_workload

REQUEST_ID_HEADER = "x-request-id"
LAST_EVENT_ID_HEADER = "Last-Event-ID"
EVENT_IDS_HEADER = "X-Eesd-Event-Ids"
"""Asks for the ids. Many clients read lines that begin with `data:` and nothing else."""
NONCE_BYTES = 16

_TEXT: Mapping[str, object] = {"type": "string"}
HEADERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "X-Request-Id": (
        "becomes the answer's id, unless the body has one",
        {"type": "string", "pattern": REQUEST_ID_PATTERN},
    ),
    "traceparent": ("W3C trace context that the request belongs to", _TEXT),
    EVENT_IDS_HEADER: (
        "whether the events of a stream have ids, with which it can be resumed",
        {"enum": ["true", "false"]},
    ),
    LAST_EVENT_ID_HEADER: ("resumes a stream after the event with this id", _TEXT),
    "X-Eesd-Workload": (
        "class of requests that share what is learnt about drafts",
        {"type": "string", "pattern": WORKLOAD_PATTERN},
    ),
}
"""Description and JSON schema of each header of a request for text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Facts about a request that its body does not have."""

    request_id: str | None = None
    """Value of the header; the id in a body overrides it."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    """Random bytes of this request: its id, if it has no other."""
    traceparent: str | None = None
    """Parent of the spans of this request."""
    workload: str | None = None
    """Value of the header; the class in a body overrides it."""
    permit: Permit | None = None
    """None outside of HTTP."""
    last_event_id: str | None = None
    """Event after which a stream is resumed, with its first request id; None for a new one."""
    sends_event_ids: bool = False
    """True if the events of a new stream get ids, as those of a resumed one always do."""

    @property
    def caller(self) -> str:
        """Name of the caller's key; empty outside of HTTP."""
        return "" if self.permit is None else self.permit.key.name

    @classmethod
    def of(
        cls,
        headers: Mapping[str, str],
        *,
        nonce: bytes,
        traceparent: str | None,
        permit: Permit | None,
    ) -> Self:
        """Reads the headers, of any case. Raises RequestError for values that are not valid."""
        return cls(
            request_id=headers.get(REQUEST_ID_HEADER),
            nonce=nonce,
            traceparent=traceparent,
            workload=checked_workload(headers.get(WORKLOAD_HEADER)),
            permit=permit,
            last_event_id=headers.get(LAST_EVENT_ID_HEADER),
            sends_event_ids=_asks_for_ids(headers.get(EVENT_IDS_HEADER)),
        )


def _asks_for_ids(value: str | None) -> bool:
    if value is None:
        return False
    if value.lower() not in ("true", "false"):
        raise RequestError(
            f"{EVENT_IDS_HEADER}: found {ascii(value)[:40]}, expected true or false",
            param=EVENT_IDS_HEADER,
        )
    return value.lower() == "true"
