"""Results of a batch's rows, and the records that an output has of them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from eesd_dist.errors import EngineError, PoisonRequest
from serve_app.batch.rows import Row
from serve_app.openai.errors import http_error_of
from serve_app.openai.sse import encoded

RECORD_START = b'{"id":"batch_req_'


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Result of a row: an answer, or an error."""

    custom_id: str
    ordinal: int
    digest: str
    status: int
    """HTTP status of the answer."""
    body: bytes
    """The answer, or OpenAI's error object: JSON in one line."""
    answer: Mapping[str, Any]
    """The answer; empty where there is none."""
    error_code: str = ""
    error: str = ""
    """Reason why there is no answer; empty if there is one."""
    is_engine_failure: bool = False
    """True if the engine failed, and another row may have failed in its place."""

    @property
    def has_failed(self) -> bool:
        return bool(self.error)

    def record(self) -> bytes:
        """Returns OpenAI's output line, with the digest of the row."""
        unique = hashlib.sha256(self.custom_id.encode(errors="backslashreplace")).hexdigest()[:24]
        failure = None
        if self.has_failed:
            failure = {"code": self.error_code, "message": self.error}
        request_id = self.answer.get("id")
        head = {"id": f"batch_req_{unique}", "custom_id": self.custom_id}
        response = {"status_code": self.status, "request_id": request_id}
        tail = {"error": failure, "digest": self.digest}
        return b'%s,"response":%s,"body":%s},%s\n' % (
            encoded(head)[:-1],
            encoded(response)[:-1],
            self.body,
            encoded(tail)[1:],
        )

    def columns(self) -> dict[str, object]:
        """Returns the row of a table, with the names of Ray Data's processors."""
        return {
            "custom_id": _printable(self.custom_id),
            "row": self.ordinal,
            **generation_columns(self.answer),
            "response": self.body.decode(errors="replace"),
            "digest": self.digest,
        }


def generation_columns(answer: Mapping[str, Any]) -> dict[str, object]:
    """Returns what an answer's first choice says, in columns of one type each, without an answer
    too."""
    choices = answer.get("choices") or [{}]
    first = choices[0]
    message = first.get("message") or {}
    usage = answer.get("usage") or {}
    return {
        "generated_text": _printable(str(first.get("text", message.get("content")) or "")),
        "generated_tokens": list(first.get("token_ids") or ()),
        "num_input_tokens": int(usage.get("prompt_tokens") or 0),
        "num_generated_tokens": int(usage.get("completion_tokens") or 0),
        "finish_reason": str(first.get("finish_reason") or ""),
        "metrics": encoded(answer.get("metrics") or {}).decode(),
    }


def _printable(text: str) -> str:
    """Returns the text with half surrogates written out, for which UTF-8 has no form."""
    return text.encode(errors="backslashreplace").decode()


def answered(row: Row, body: bytes) -> RowResult:
    return RowResult(
        custom_id=row.custom_id,
        ordinal=row.ordinal,
        digest=row.digest,
        status=int(HTTPStatus.OK),
        body=body,
        answer=json.loads(body),
    )


def failed(row: Row, error: Exception) -> RowResult:
    http_error = http_error_of(error)
    return RowResult(
        custom_id=row.custom_id,
        ordinal=row.ordinal,
        digest=row.digest,
        status=http_error.status,
        body=encoded(http_error.body),
        answer={},
        error_code=http_error.code or http_error.type,
        error=http_error.message,
        is_engine_failure=isinstance(error, EngineError) and not isinstance(error, PoisonRequest),
    )


def is_transient(status: object) -> bool:
    """Returns whether a row with this status was refused for lack of room, or failed on our side:
    it is run again by the next run."""
    return isinstance(status, int) and (
        status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    )
