"""A running service as an engine: token ids go out over its HTTP API, token ids come back.

For `eesd batch --url`. A text comes whole, so its rounds are seen as one; log-probabilities, which
the API gives by text and not by id, are refused.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from eesd_dist.errors import CapacityError, EngineError, RequestError
from eesd_dist.types import Emission, FinishReason, Request, RequestId, TokenId

_TIMEOUT_S = 3600.0
_TOO_MANY = 429
_SERVER_ERROR = 500


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
        if request.sampling.top_logprobs is not None:
            raise RequestError(
                "logprobs are not available over --url: leave the field out, or run the batch "
                "without --url",
                param="logprobs",
            )
        answer = await self._posted(_body(request, model=self._model))
        choice = answer["choices"][0]
        statistics = answer.get("metrics", {}).get("speculative_decoding") or {}
        tokens = tuple(TokenId(token) for token in choice["token_ids"])
        yield Emission(
            request_id=request.request_id,
            tokens=tokens,
            num_accepted=statistics.get("num_accepted_draft_tokens", 0),
            num_drafted=statistics.get("num_draft_tokens", 0),
            finish_reason=FinishReason(choice["finish_reason"]),
        )

    async def abort(self, request_id: RequestId) -> None:
        """Closing the connection is what tells the service; httpx does it on cancellation."""
        del request_id

    async def model_card(self) -> Mapping[str, Any]:
        """What the service says of the model it serves."""
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"no service answers at {self._http.base_url}: {error}") from error
        card: Mapping[str, Any] = answer.json()["data"][0]
        return card

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _posted(self, body: Mapping[str, object]) -> Any:
        try:
            answer = await self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the service does not answer: {error!r}") from error
        if answer.is_success:
            return answer.json()
        said = _said(answer)
        if answer.status_code == _TOO_MANY:
            raise CapacityError(said)
        if answer.status_code >= _SERVER_ERROR:
            raise EngineError(said)
        raise RequestError(said)


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


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
        "return_token_ids": True,
        "speculation": {
            "mode": speculation.mode,
            "controller": speculation.controller,
            "max_draft_tokens": speculation.max_draft_tokens,
            "tree": speculation.tree,
        },
    }
