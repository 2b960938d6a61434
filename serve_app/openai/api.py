"""The HTTP endpoints.

Maps paths to operations, behind the admission gate. Holds no state outside the application it
builds, so that the same application runs under uvicorn and inside Ray Serve.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from eesd_dist.errors import CapacityError, EesdError, RequestError
from eesd_dist.parameters import check_ids, conversation_of
from eesd_dist.telemetry.metrics import CONTENT_TYPE
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.text import TextCodec
from eesd_dist.types import TokenId
from serve_app.openai.answers import Event, Json
from serve_app.openai.api_settings import ApiSettings, Limits
from serve_app.openai.console.pages import add_pages
from serve_app.openai.context import LAST_EVENT_ID_HEADER, REQUEST_ID_HEADER, RequestContext
from serve_app.openai.errors import (
    HttpError,
    NotReady,
    http_error_of,
    http_error_of_fields,
)
from serve_app.openai.generation import EngineClient
from serve_app.openai.keys import KeyRing
from serve_app.openai.middleware.departures import Departures
from serve_app.openai.middleware.gate import AdmissionGate
from serve_app.openai.middleware.head_requests import HeadRequests
from serve_app.openai.middleware.http_metrics import (
    CountedRequests,
    HttpMetrics,
    note_refusal,
)
from serve_app.openai.middleware.http_spans import TracedRequests, traceparent_inside
from serve_app.openai.middleware.permits import RATE_LIMIT_HEADERS, Quotas, noted_permit
from serve_app.openai.middleware.request_ids import (
    NamedRequests,
    nonce_of,
    note_request_id,
)
from serve_app.openai.middleware.unexpected_errors import UnexpectedErrors
from serve_app.openai.openapi import describe_truly
from serve_app.openai.preparation import Preparation
from serve_app.openai.prepared import Prepared
from serve_app.openai.schema import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponsesFields,
    TokenizeFields,
)
from serve_app.openai.sse import EventStream, encoded, while_listened_to
from serve_app.openai.text_responses import response_events, response_of
from serve_app.openai.text_service import TextService
from serve_app.openai.work_queues import size_of_chat

logger = logging.getLogger(__name__)


class Degraded(str):
    """Result of a health check: text can be generated, but in degraded mode."""


Health = Callable[[], Awaitable[str | None]]
"""Returns None when text can be generated, `Degraded`, or else the reason why not."""
Metrics = Callable[[], Awaitable[bytes]]
"""Returns the Prometheus text."""


def build_api(
    engine: EngineClient,
    settings: ApiSettings,
    *,
    tokenizer: TextCodec,
    limits: Limits,
    health: Health,
    metrics: Metrics,
    kv_tokens: Callable[[], int | None] = lambda: None,
    tracing: Tracing | None = None,
    http_metrics: HttpMetrics | None = None,
    keys: KeyRing | None = None,
    quotas: Quotas | None = None,
) -> FastAPI:
    """Builds the OpenAI API of one model. `keys` open it (None: no key is required), and `quotas`
    keep their limits. `kv_tokens` returns what the KV pages hold, None while it is not known."""
    preparation = Preparation(tokenizer, settings, limits=limits, kv_tokens=kv_tokens)
    service = TextService(
        engine,
        preparation,
        tracing=tracing,
        observe_request=None if http_metrics is None else http_metrics.observe_request,
        quotas=quotas,
    )
    title = f"{settings.model_name} behind an OpenAI-compatible API"
    app = FastAPI(title=title, version=_version(), docs_url=None, redoc_url=None)
    add_pages(app)
    _answer_errors(app)
    _add_generation(app, service)
    _add_models(app, preparation)
    _add_tokens(app, preparation, service)
    _add_operations(app, health=health, metrics=metrics)
    describe_truly(app, has_key=keys is not None)
    app.add_middleware(AdmissionGate, limits=limits, keys=keys, quotas=quotas)
    app.add_middleware(Departures, errors=settings.departures)
    app.add_middleware(UnexpectedErrors, answer=_answer_of)
    app.add_middleware(HeadRequests)
    if settings.cors_origins:  # outermost: a browser's question about a request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, "retry-after", *RATE_LIMIT_HEADERS],
        )
    if http_metrics is not None:
        app.add_middleware(CountedRequests, metrics=http_metrics, routes=app.routes)
    if tracing is not None and tracing.is_on:  # its span has all others in it
        app.add_middleware(TracedRequests, tracer=tracing.tracer, routes=app.routes)
    app.add_middleware(NamedRequests, routes=app.routes, names_answers=settings.names_answers)
    return app


def _add_generation(app: FastAPI, service: TextService) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(fields: CompletionFields, request: HttpRequest) -> Response:
        """Continues one or more prompts."""
        return await _answered(service, fields, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(fields: ChatFields, request: HttpRequest) -> Response:
        """Answers a conversation."""
        return await _answered(service, fields, request)

    @app.post("/v1/responses", response_model=None)
    async def responses(fields: ResponsesFields, request: HttpRequest) -> Response:
        """Answers a conversation, in the form of OpenAI's newer API. Nothing is stored."""
        return await _answered_as_response(service, fields, request)


async def _answered_as_response(
    service: TextService, fields: ResponsesFields, request: HttpRequest
) -> Response:
    if request.headers.get(LAST_EVENT_ID_HEADER) is not None:
        raise RequestError(
            f"{LAST_EVENT_ID_HEADER}: these streams cannot be resumed", param=LAST_EVENT_ID_HEADER
        )
    prepared = await _prepared(service, fields.as_chat(), request)

    async def body() -> Response:
        return _json(response_of(await service.whole(prepared), prepared, fields))

    events = response_events(service.events(prepared), prepared, fields)
    return await _response(service, prepared, request, body=body, events=events)


async def _answered(
    service: TextService, fields: CompletionFields | ChatFields, request: HttpRequest
) -> Response:
    prepared = await _prepared(service, fields, request)

    async def body() -> Response:
        return Response(await service.body(prepared), media_type="application/json")

    events = service.events(prepared)
    return await _response(service, prepared, request, body=body, events=events)


async def _prepared(
    service: TextService, fields: CompletionFields | ChatFields, request: HttpRequest
) -> Prepared:
    """Raises ClientDisconnect when the client leaves before its grammar is compiled."""

    context = _context_of(request)

    def prepare() -> Awaitable[Prepared]:
        return service.prepared(fields, context)

    waits = service.has_to_compile(fields)
    prepared = await (while_listened_to(request.receive, prepare) if waits else prepare())
    note_request_id(request.scope, prepared.request_id)
    return prepared


def _context_of(request: HttpRequest) -> RequestContext:
    scope = request.scope
    return RequestContext.of(
        request.headers,
        nonce=nonce_of(scope),
        traceparent=traceparent_inside(scope),
        permit=noted_permit(scope),
    )


async def _response(
    service: TextService,
    prepared: Prepared,
    request: HttpRequest,
    *,
    body: Callable[[], Awaitable[Response]],
    events: AsyncGenerator[Event, None],
) -> Response:
    """Sends the whole answer, or its events."""
    try:
        if not prepared.options.stream:
            return await while_listened_to(request.receive, body)
        first = await while_listened_to(request.receive, lambda: _first(events))
    except CapacityError as error:
        error.retry_after_s = service.retry_after_s()
        raise
    except asyncio.CancelledError:  # perhaps with a first event that nothing sends
        await events.aclose()
        raise
    return EventStream(first, events)


async def _first(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


def _add_models(app: FastAPI, preparation: Preparation) -> None:
    settings = preparation.settings

    def card() -> Json:
        return {
            "id": settings.model_name,
            "object": "model",
            "created": settings.created_unix_s,
            "owned_by": "eesd",
            "max_model_len": preparation.max_model_len,
            "default_sampling_params": settings.sampling_defaults.stated(),
        }

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """Lists the served model."""
        return _json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """Returns the served model, by name."""
        preparation.check_model(name)
        return _json(card())


def _add_tokens(app: FastAPI, preparation: Preparation, service: TextService) -> None:
    codec = preparation.codec

    def tokens_of(fields: TokenizeFields) -> Sequence[TokenId]:
        if fields.messages is None:
            return codec.encode(fields.prompt or "", add_special_tokens=fields.add_special_tokens)
        return codec.encode_chat(
            conversation_of(fields.messages), add_generation_prompt=fields.add_generation_prompt
        )

    @app.post("/tokenize", response_model=None)
    async def tokenize(fields: TokenizeFields, request: HttpRequest) -> Response:
        """Returns the token ids of a prompt, or of a conversation through the chat template."""
        preparation.check_model(fields.model)
        size = len(fields.prompt or "") + size_of_chat(fields.messages or (), {})
        permit = noted_permit(request.scope)
        tokenising = service.threads.run(partial(tokens_of, fields), size=size)
        tokens = await service.charges.tokenised(tokenising, permit, size=size)
        if permit is not None:
            permit.num_work_tokens += len(tokens)
        preparation.check_count(tokens, param="prompt" if fields.messages is None else "messages")
        limit = preparation.max_model_len
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": list(tokens)})

    @app.post("/detokenize", response_model=None)
    async def detokenize(fields: DetokenizeFields, request: HttpRequest) -> Response:
        """Returns the text of token ids, special tokens included."""
        preparation.check_model(fields.model)
        preparation.check_count(fields.tokens, param="tokens")
        check_ids(fields.tokens, codec, param="tokens")
        tokens = [TokenId(token) for token in fields.tokens]
        await service.charges.work(noted_permit(request.scope), len(tokens))
        decode = partial(codec.decode, tokens, skip_special_tokens=False)
        return _json({"prompt": await service.threads.run(decode, size=len(tokens))})


def _add_operations(app: FastAPI, *, health: Health, metrics: Metrics) -> None:
    @app.get("/ready", response_model=None)
    @app.get("/health", response_model=None)
    async def ready(request: HttpRequest) -> Response:
        """Returns 200 when text can be generated, with a body only when degraded, else 503 with
        the reason."""
        reason = await health()
        if isinstance(reason, Degraded):
            return Response(reason, media_type="text/plain")
        if reason is None:
            return _well()
        answer = http_error_of(NotReady(reason))
        note_refusal(request.scope, answer)
        return _refusal(answer)

    @app.get("/ping", response_model=None)
    async def alive() -> Response:
        """Returns 200 as long as this process answers."""
        return _well()

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        """Returns the metrics as Prometheus text."""
        return Response(await metrics(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version", response_model=None)
    async def served_version() -> Response:
        """Returns the version of this program."""
        return _json({"version": _version()})


def _answer_errors(app: FastAPI) -> None:
    async def by_table(request: HttpRequest, error: Exception) -> Response:
        return _answer_of(request, error)

    for kind in (RequestValidationError, HTTPException, EesdError, Exception):
        app.add_exception_handler(kind, by_table)


def _answer_of(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        answer = http_error_of_fields(error.errors())
    else:
        answer = http_error_of(error)
    note_refusal(request.scope, answer)
    return _refusal(answer)


def _well() -> Response:
    """A probe's answer: no text, with the type that the document has."""
    return Response(media_type="text/plain")


def _json(content: Json) -> Response:
    return Response(encoded(content), media_type="application/json")


def _refusal(error: HttpError) -> Response:
    return Response(
        encoded(error.body),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


@cache  # reading it takes ten milliseconds, and anyone may ask for it
def _version() -> str:
    try:
        return version("eesd-dist")
    except PackageNotFoundError:
        return "unknown"
