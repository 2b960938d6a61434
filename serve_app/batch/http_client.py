"""A running service as an engine: token ids go out over its HTTP API, token ids come back.

For `eesd batch --url`. A text comes whole, so its rounds are seen as one; log-probabilities, which
the API gives by text and not by id, are refused. Only what the service finds wrong with a request
itself is a RequestError: a service that is away, or another one, is no fault of the request.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from eesd_dist.errors import CapacityError, ConfigError, EesdError, EngineError, RequestError
from eesd_dist.types import Emission, FinishReason, Request, RequestId, TokenId

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
_ADVICE: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "check the API key",
    HTTPStatus.FORBIDDEN: "check the API key, and what it may do",
    HTTPStatus.NOT_FOUND: "check --url, and that the model is still served there under its name",
    HTTPStatus.METHOD_NOT_ALLOWED: "check --url: that is no eesd service",
    HTTPStatus.REQUEST_TIMEOUT: "check what stands between here and the service: it gave up",
}
_SURPRISES = (ValueError, KeyError, IndexError, TypeError, AttributeError)
"""What reading an answer of another form raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a service says of the model it serves."""

    name: str
    max_model_len: int


class HttpClient:
    """An `EngineClient` (serve_app.openai.client). Close it in the end."""

    def __init__(self, url: str, *, model: str, api_key: str | None) -> None:
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )

    async def stream(self, request: Request) -> AsyncIterator[Emission]:
        asked = request.sampling
        for what, param, is_asked in (
            ("logprobs are", "logprobs", asked.top_logprobs is not None),
            ("prompt_logprobs are", "prompt_logprobs", asked.prompt_logprobs is not None),
            ("structured output is", "response_format", asked.grammar is not None),
            ("bad_words are", "bad_words", bool(asked.bad_words)),
        ):
            if is_asked:
                raise RequestError(
                    f"{what} not available over --url: leave the field out, or run the batch "
                    "without --url",
                    param=param,
                )
        answer = await self._posted(_body(request, model=self._model))
        try:
            emission = _emission(answer.json(), request.request_id)
        except _SURPRISES as error:
            raise EngineError(self._no_service_of_ours(answer, error)) from error
        yield emission

    async def abort(self, request_id: RequestId) -> None:
        """Closing the connection is what tells the service; httpx does it on cancellation."""
        del request_id

    async def model_card(self) -> ModelCard:
        """Raises ConfigError where something else than an eesd service answers."""
        try:
            answer = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise EngineError(f"no service answers at {self._address}: {error}") from error
        if not answer.is_success:
            raise EngineError(f"no service answers at {self._address}: {_found(answer)}")
        try:
            card = answer.json()["data"][0]
            return ModelCard(name=str(card["id"]), max_model_len=int(card["max_model_len"]))
        except _SURPRISES as error:
            raise ConfigError(self._no_service_of_ours(answer, error)) from error

    async def aclose(self) -> None:
        await self._http.aclose()

    @property
    def _address(self) -> str:
        """Without its password: errors are written to the output file."""
        return str(self._http.base_url.copy_with(userinfo=b"")).rstrip("/")

    async def _posted(self, body: Mapping[str, object]) -> httpx.Response:
        try:
            answer = await self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the service does not answer: {error!r}") from error
        if not answer.is_success:
            raise _refusal(answer)
        return answer

    def _no_service_of_ours(self, answer: httpx.Response, error: Exception) -> str:
        return (
            f"{self._address} is no eesd service: {answer.request.url.path} was answered, but not "
            f"in the form that was expected ({error!r}); give --url the address that `eesd serve` "
            "has shown"
        )


def _refusal(answer: httpx.Response) -> EesdError:
    if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return _no_capacity(answer)
    if answer.status_code in _FAULT_OF_THE_REQUEST:
        return RequestError(_said(answer))
    return EngineError(f"the service does not take the request: {_found(answer)}")


def _no_capacity(answer: httpx.Response) -> CapacityError:
    error = CapacityError(_said(answer))
    seconds = answer.headers.get("Retry-After", "")
    if seconds.isascii() and seconds.isdigit():  # it may also be a date, from a gateway
        error.retry_after_s = min(float(seconds[:_MAX_DIGITS]), _MAX_RETRY_AFTER_S)
    return error


def _found(answer: httpx.Response) -> str:
    advice = _ADVICE.get(answer.status_code, "the service's log has the details")
    return f"HTTP {answer.status_code} ({_said(answer)}); {advice}"


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except _SURPRISES:
        return answer.reason_phrase or f"HTTP {answer.status_code}"


def _emission(content: Any, request_id: RequestId) -> Emission:
    choice = content["choices"][0]
    statistics = content.get("metrics", {}).get("speculative_decoding") or {}
    return Emission(
        request_id=request_id,
        tokens=tuple(TokenId(token) for token in choice["token_ids"]),
        num_accepted=statistics.get("num_accepted_draft_tokens", 0),
        num_drafted=statistics.get("num_draft_tokens", 0),
        finish_reason=FinishReason(choice["finish_reason"]),
    )


def _body(request: Request, *, model: str) -> dict[str, object]:
    sampling, speculation = request.sampling, request.speculation
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
        "seed": sampling.seed,
        # The row's own end tokens are all there; the service must not add its model's.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "allowed_token_ids": sampling.allowed_token_ids,
        "return_token_ids": True,
        "cache_salt": request.cache_salt or None,
        "speculation": {
            "mode": speculation.mode,
            "controller": speculation.controller,
            "max_draft_tokens": speculation.max_draft_tokens,
            "tree": speculation.tree,
        },
    }
