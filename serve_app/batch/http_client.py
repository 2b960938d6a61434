"""Rows of a batch, answered by a running service over its HTTP API.

For `eesd batch --url`. A row is sent as it is: the service has the tokenizer and the chat template.
Only what the service finds wrong with a row itself is a RequestError: a service that is away, or
another one, is no fault of the row.
"""

from collections.abc import Mapping
from http import HTTPStatus

import httpx

from eesd_dist.errors import CapacityError, ConfigError, EesdError, EngineError, RequestError
from serve_app.batch.loop import ServiceAway
from serve_app.batch.rows import URL_OF_KIND
from serve_app.openai.sse import encoded
from serve_app.openai.workloads import Kind

_TIMEOUT_S = 3600.0
_MAX_RETRY_AFTER_S = 120.0
"""A service or gateway that asks for more is asked again after this long."""
_MAX_DIGITS = 6
_FAULT_OF_THE_REQUEST = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,  # a poison request
    }
)
_AWAY = frozenset(
    {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)
"""A service that starts, recovers or is being replaced, and the gateways before it."""
_ADVICE: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "check the API key",
    HTTPStatus.FORBIDDEN: "check the API key, and what it may do",
    HTTPStatus.NOT_FOUND: "check --url, and that the model is still served there under its name",
    HTTPStatus.METHOD_NOT_ALLOWED: "check --url: that is no eesd service",
    HTTPStatus.REQUEST_TIMEOUT: "check what stands between here and the service: it gave up",
}
_SURPRISES = (ValueError, KeyError, IndexError, TypeError, AttributeError)
"""Exceptions raised by reading an answer of another form."""


class HttpClient:
    """A service with OpenAI's API. Close it in the end."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx.Timeout(_TIMEOUT_S, connect=10.0),
                limits=httpx.Limits(max_connections=None),
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {url}: {error}") from error

    async def model_name(self) -> str:
        """Returns the name of the first model that the service lists. Raises ConfigError where
        something else than such a service answers."""
        try:
            answer = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise EngineError(f"no service answers at {self._address}: {error}") from error
        if not answer.is_success:
            raise EngineError(f"no service answers at {self._address}: {_reason_of(answer)}")
        try:
            return str(answer.json()["data"][0]["id"])
        except _SURPRISES as error:
            raise ConfigError(self._no_such_service(answer, error)) from error

    async def answer(self, kind: Kind, body: Mapping[str, object]) -> bytes:
        """Returns the response to the body of a row, in one line."""
        try:
            answer = await self._http.post(URL_OF_KIND[kind], json=body)
        except httpx.HTTPError as error:
            raise ServiceAway(f"the service does not answer: {error!r}") from error
        if not answer.is_success:
            raise _refusal(answer)
        try:
            content = answer.json()
            int(content["usage"]["completion_tokens"])
        except _SURPRISES as error:
            raise EngineError(self._no_such_service(answer, error)) from error
        return encoded(content)

    async def aclose(self) -> None:
        await self._http.aclose()

    @property
    def _address(self) -> str:
        """The URL without its password: errors are written to the output file."""
        return str(self._http.base_url.copy_with(userinfo=b"")).rstrip("/")

    def _no_such_service(self, answer: httpx.Response, error: Exception) -> str:
        return (
            f"{self._address} is no eesd service: {answer.request.url.path} was answered, but not "
            f"in the form that was expected ({error!r}); give --url the address that `eesd serve` "
            "has shown"
        )


def _refusal(answer: httpx.Response) -> EesdError:
    if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return _no_capacity(answer)
    if answer.status_code in _FAULT_OF_THE_REQUEST or _code(answer) == "model_not_found":
        return RequestError(_message_of(answer))
    kind = ServiceAway if answer.status_code in _AWAY else EngineError
    return kind(f"the service does not take the request: {_reason_of(answer)}")


def _no_capacity(answer: httpx.Response) -> CapacityError:
    error = CapacityError(_message_of(answer))
    seconds = answer.headers.get("Retry-After", "")
    if seconds.isascii() and seconds.isdigit():  # it may also be a date, from a gateway
        error.retry_after_s = min(float(seconds[:_MAX_DIGITS]), _MAX_RETRY_AFTER_S)
    return error


def _reason_of(answer: httpx.Response) -> str:
    advice = _ADVICE.get(answer.status_code, "the service's log has the details")
    return f"HTTP {answer.status_code} ({_message_of(answer)}); {advice}"


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except _SURPRISES:
        return answer.reason_phrase or f"HTTP {answer.status_code}"


def _code(answer: httpx.Response) -> str | None:
    try:
        return str(answer.json()["error"]["code"])
    except _SURPRISES:
        return None
