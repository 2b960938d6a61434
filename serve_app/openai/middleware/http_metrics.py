"""Metrics of the answers of one ingress: as the clients see them, refusals included.

The metrics of a pipeline know neither requests that never reach it nor texts that end at a stop
string.
"""

from collections.abc import Sequence
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eesd_dist.telemetry.metrics import FIRST_TOKEN_S, REQUEST_S, RequestTimings
from eesd_dist.types import FinishReason
from serve_app.openai.errors import HttpError
from serve_app.openai.keys import Permit
from serve_app.openai.middleware.departures import CLIENT_CLOSED_REQUEST, has_left
from serve_app.openai.middleware.permits import noted_permit

_REASON = "eesd.refused"
"""Key of a request's scope: why it was refused."""
OTHER_PATH = "other"
"""Paths that the API does not have: a client may ask for any number of them."""


class HttpMetrics:
    """Metrics in a separate registry, with the label `ingress`."""

    def __init__(self, *, ingress: str = "") -> None:
        self.registry = CollectorRegistry()
        self._ingress = ingress
        self._requests = Counter(
            "eesd_http_requests",
            "Answers, by status; 499: the client left before the end.",
            ("ingress", "path", "status"),
            registry=self.registry,
        )
        self._refusals = Counter(
            "eesd_http_refused_requests",
            "Answers with an error, by its code, or its type where it has none.",
            ("ingress", "reason"),
            registry=self.registry,
        )
        self._open = Gauge(
            "eesd_http_open_requests",
            "Requests that are being read, waited for or answered.",
            ("ingress",),
            registry=self.registry,
        ).labels(ingress)
        self._finished = Counter(
            "eesd_client_finished_texts",
            "Texts as clients get them. abort: the client left, or an error ended it.",
            ("ingress", "finished_reason"),
            registry=self.registry,
        )
        self._of_keys = Counter(
            "eesd_key_requests",
            "Answers to requests of an API key, by status.",
            ("ingress", "key", "status"),
            registry=self.registry,
        )
        self._tokens_of_keys = Counter(
            "eesd_key_tokens",
            "Tokens of prompts, answers and other work of an API key.",
            ("ingress", "key", "kind"),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "eesd_client_time_to_first_token_seconds",
            "Arrival at the ingress to first token.",
            FIRST_TOKEN_S,
        )
        self._e2e = self._histogram(
            "eesd_client_request_seconds", "Arrival at the ingress to the end of a text.", REQUEST_S
        )
        for reason in FinishReason:  # a rate needs a first sample at zero
            self._finished.labels(ingress, reason.value)

    def observe_request(self, timings: RequestTimings) -> None:
        if timings.finish_reason is not None:
            self._finished.labels(self._ingress, timings.finish_reason.value).inc()
        if timings.e2e_s is not None:
            self._e2e.observe(timings.e2e_s)
        if timings.time_to_first_token_s is not None:
            self._first_token.observe(timings.time_to_first_token_s)

    def begin(self) -> None:
        self._open.inc()

    def end(self, *, path: str, status: int, reason: str | None) -> None:
        self._open.dec()
        self._requests.labels(self._ingress, path, str(status)).inc()
        if status >= HTTPStatus.BAD_REQUEST and status != CLIENT_CLOSED_REQUEST:
            self._refusals.labels(self._ingress, reason or str(status)).inc()

    def note_key(self, permit: Permit, *, status: int) -> None:
        key = permit.key.name
        self._of_keys.labels(self._ingress, key, str(status)).inc()
        for kind, number in (
            ("prompt", permit.num_prompt_tokens),
            ("generated", permit.num_generated_tokens),
            ("work", permit.num_work_tokens),
        ):
            self._tokens_of_keys.labels(self._ingress, key, kind).inc(number)

    def page(self) -> bytes:
        """Returns the metrics as Prometheus text."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ("ingress",), buckets=buckets, registry=self.registry)
        return histogram.labels(self._ingress)


class CountedRequests:
    """ASGI middleware around the whole API."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, routes: Sequence[BaseRoute]) -> None:
        """`routes`: of the API, which may become more. A path with a name in braces, such as
        `/v1/models/{name}`, stands for all that begin like it."""
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        """Status of a request without an answer."""

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.begin()
        try:
            await self._app(scope, receive, noted)
        except Exception:  # of what lies between this and `UnexpectedErrors`
            scope.setdefault(_REASON, "internal_error")
            raise
        finally:
            path = path_format_of(scope, self._routes)
            status = CLIENT_CLOSED_REQUEST if has_left(scope) else status
            self._metrics.end(path=path, status=status, reason=reason_of(scope))
            if (permit := noted_permit(scope)) is not None:
                self._metrics.note_key(permit, status=status)


def path_format_of(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """Returns the path of the route that a request is for, or OTHER_PATH."""
    request_path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    for path in (route.path_format for route in routes if isinstance(route, Route)):
        start, brace, _ = path.partition("{")
        if request_path.startswith(start) if brace else request_path == path:
            return path
    return OTHER_PATH


def reason_of(scope: Scope) -> str | None:
    """Returns why a request is refused; None if it is not."""
    return scope.get(_REASON)


def note_refusal(scope: Scope, error: HttpError) -> None:
    """Remembers why a request is refused, for metrics and spans."""
    scope[_REASON] = error.code or error.type
