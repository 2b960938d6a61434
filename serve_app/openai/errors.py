"""The table from errors to HTTP.

It maps a class to a status and to OpenAI's error type and code; the first matching row applies.
Errors that are not this project's are logged, and answered with 500 and no detail.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from eesd_dist.errors import (
    CapacityError,
    EesdError,
    EngineError,
    PoisonRequest,
    PromptTooLong,
    QueueFull,
    RequestError,
    ResumedElsewhere,
)
from eesd_dist.removed import replacement_of

logger = logging.getLogger(__name__)

_ECHOED_CHARS = 80
_NESTED_FIELDS = frozenset(
    {
        "logit_bias",
        "messages",
        "response_format",
        "speculation",
        "stream_options",
        "structured_outputs",
    }
)


class UnknownModel(RequestError):
    def __init__(self, *, name: str, served: str) -> None:
        super().__init__(
            f"the model '{name[:_ECHOED_CHARS]}' is not served here: use '{served}' (GET "
            "/v1/models lists it)",
            param="model",
        )


class UnknownKey(RequestError):
    def __init__(self) -> None:
        super().__init__("missing or wrong API key: send 'Authorization: Bearer <key>'")


class KeysUnknown(EngineError):
    """A key that may be in the file of keys, which cannot be read."""

    def __init__(self) -> None:
        super().__init__(
            "API keys cannot be checked now, since the service's file of keys is wrong or missing: "
            "try again later; for operators, the log and `refused_keys` of /debug/pipelines say "
            "what is wrong"
        )


class NotAnOperator(RequestError):
    def __init__(self, *, path: str) -> None:
        super().__init__(
            f"{path[:_ECHOED_CHARS]} is for operators: send a key with `operator: true`"
        )


class TooManyRequests(CapacityError):
    def __init__(self, *, key: str, limit: int, wait_s: float) -> None:
        super().__init__(
            f"{limit} requests of the key {key!r} are being answered, as many as it may have: "
            "try again when one has ended"
        )
        self.retry_after_s = wait_s


class TooManyTokens(CapacityError):
    def __init__(self, *, key: str, limit: int, wait_s: float) -> None:
        super().__init__(
            f"the key {key!r} has used its {limit} tokens per minute: try again in {wait_s:.1f} s"
        )
        self.retry_after_s = wait_s


class KeyRequired(RequestError):
    def __init__(self) -> None:
        super().__init__(
            "this service has no API key, and without one nothing is changed over HTTP: start it "
            "with EESD_API_KEY, or use `eesd pipelines` where it runs"
        )


class UnknownPipeline(RequestError):
    def __init__(self, *, name: str) -> None:
        super().__init__(
            f"no pipeline '{name[:_ECHOED_CHARS]}' is running here: GET /debug/pipelines lists them"
        )


class NotDrained(RequestError):
    """A pipeline stays as it is."""


class BodyTooLarge(RequestError):
    def __init__(self, *, limit: int) -> None:
        super().__init__(
            f"found a body of more than {limit} bytes, expected at most {limit}: send fewer or "
            "shorter prompts per request"
        )


class EncodedBody(RequestError):
    def __init__(self, *, encoding: str) -> None:
        super().__init__(
            f"found a body with Content-Encoding {encoding[:_ECHOED_CHARS]!r}, expected JSON as it "
            "is: send it without compression"
        )


class HeadTooLarge(RequestError):
    def __init__(self, *, limit: int) -> None:
        super().__init__(f"found headers of more than {limit} bytes, expected at most {limit}")


class TooSlow(RequestError):
    def __init__(self, *, section: str, limit_s: float) -> None:
        super().__init__(
            f"the {section} had not arrived after {limit_s:g} s: send the request in one piece"
        )


class RequestExpired(CapacityError):
    def __init__(self, *, limit_s: float) -> None:
        super().__init__(
            f"the request was not finished within {limit_s:g} s of its arrival and was ended: try "
            "again later, ask for fewer tokens, or raise limits.request_ttl_s"
        )


class NotReady(EngineError):
    """A failed health check: no text can be generated now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Answer to one class of errors."""

    error: type[Exception]
    status: int
    type: str
    code: str | None = None


_INVALID = "invalid_request_error"

TABLE: tuple[Row, ...] = (
    Row(error=UnknownKey, status=401, type="authentication_error", code="invalid_api_key"),
    Row(error=NotAnOperator, status=403, type="permission_error", code="operator_key_needed"),
    Row(error=KeyRequired, status=403, type="permission_error", code="key_required"),
    Row(error=UnknownPipeline, status=404, type="not_found_error", code="pipeline_not_found"),
    Row(error=NotDrained, status=409, type=_INVALID, code="not_drained"),
    Row(error=UnknownModel, status=404, type="not_found_error", code="model_not_found"),
    Row(error=PromptTooLong, status=400, type=_INVALID, code="context_length_exceeded"),
    Row(error=BodyTooLarge, status=413, type=_INVALID, code="request_too_large"),
    Row(error=EncodedBody, status=415, type=_INVALID, code="unsupported_encoding"),
    Row(error=HeadTooLarge, status=431, type=_INVALID, code="headers_too_large"),
    Row(error=TooSlow, status=408, type=_INVALID, code="request_timeout"),
    Row(error=ResumedElsewhere, status=409, type=_INVALID, code="resumed_elsewhere"),
    Row(error=RequestError, status=400, type=_INVALID),
    Row(error=ValidationError, status=400, type=_INVALID),
    Row(error=QueueFull, status=429, type="rate_limit_error", code="queue_full"),
    Row(error=TooManyRequests, status=429, type="rate_limit_error", code="concurrency_limit"),
    Row(error=TooManyTokens, status=429, type="rate_limit_error", code="token_limit"),
    Row(error=RequestExpired, status=503, type="server_error", code="request_expired"),
    Row(error=CapacityError, status=429, type="rate_limit_error", code="no_capacity"),
    Row(error=PoisonRequest, status=422, type=_INVALID, code="poison_request"),
    Row(error=NotReady, status=503, type="server_error", code="not_ready"),
    Row(error=KeysUnknown, status=503, type="server_error", code="keys_unknown"),
    Row(error=EngineError, status=503, type="server_error", code="engine_error"),
)
_OURS = Row(error=Exception, status=500, type="server_error", code="internal_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An error as an HTTP response."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    allow: str | None = None
    """The methods of a path, of a request with another one."""

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object; all four keys are always there."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["Allow"] = self.allow
        return headers


def http_error_of(error: Exception) -> HttpError:
    """Converts an error to its response; logs it if the service is at fault."""
    error = _unwrapped(error)
    if isinstance(error, HTTPException):
        return _of_routing(error)
    row = next((row for row in TABLE if isinstance(error, row.error)), _OURS)
    if row is _OURS:
        logger.error("request failed: internal error", exc_info=error)
        return HttpError(
            status=row.status,
            message=f"internal error ({type(error).__name__}): the service's log has the details",
            type=row.type,
            code=row.code,
        )
    if row.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.warning("request failed: %s", error)
    message, param = _message_of(error)
    return HttpError(
        status=row.status,
        message=message,
        type=row.type,
        param=param,
        code=row.code,
        retry_after_s=error.retry_after_s if isinstance(error, CapacityError) else None,
    )


def http_error_of_fields(errors: Sequence[Mapping[str, object]]) -> HttpError:
    """Converts what pydantic found wrong with a body."""
    message, param = _message_of_fields(errors)
    return HttpError(status=400, message=message, type=_INVALID, param=param)


def _unwrapped(error: Exception) -> Exception:
    """Returns the original of an actor's error, which Ray wraps together with its traceback."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, EesdError) else error


def _message_of(error: Exception) -> tuple[str, str | None]:
    if isinstance(error, ValidationError):
        return _message_of_fields([dict(entry) for entry in error.errors(include_url=False)])
    return str(error), error.param if isinstance(error, RequestError) else None


def _message_of_fields(errors: Sequence[Mapping[str, object]]) -> tuple[str, str | None]:
    """Returns all that is wrong with the first field (a union fails once per branch), and its
    name."""
    kind = str(errors[0]["type"])
    if kind == "json_invalid":
        return "the body is not valid JSON", None
    param = _param_of(errors[0]["loc"])
    if param is None and kind != "value_error":
        return "the body has to be a JSON object, sent as Content-Type: application/json", None
    reasons = dict.fromkeys(str(e["msg"]) for e in errors if _param_of(e["loc"]) == param)
    message = ", or ".join(reasons)
    value = errors[0].get("input")
    if kind == "literal_error" and isinstance(value, str):
        replacement = replacement_of(f"{param}: {value}")
        message += "" if replacement is None else f"; {replacement}"
    return (f"{param}: {message}" if param else message), param


def _param_of(location: object) -> str | None:
    """Returns a field's path, such as `messages[0].role`, without pydantic's union branches."""
    assert isinstance(location, tuple)
    names = location[1:] if location[:1] == ("body",) else location
    if not names:
        return None
    param = str(names[0])
    for name in names[1:] if param in _NESTED_FIELDS else ():
        if isinstance(name, int):
            param += f"[{name}]"
        elif name.isidentifier() and name != "str":
            param += f".{name}"
    return param


def _of_routing(error: HTTPException) -> HttpError:
    kind = "not_found_error" if error.status_code == HTTPStatus.NOT_FOUND else _INVALID
    methods = (error.headers or {}).get("Allow")
    if methods == "GET":
        methods = "GET, HEAD"  # routes do not know that `HeadRequests` answers it
    return HttpError(status=error.status_code, message=str(error.detail), type=kind, allow=methods)
