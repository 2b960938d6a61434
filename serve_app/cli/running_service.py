"""Shared by the commands for a running service: options, pages, connection.

Reading goes over HTTP, changes go over Ray, also where the service has no API key.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Typer, echo

from eesd_dist.command_line import add_callback, group
from eesd_dist.errors import EngineError
from serve_app.service.connection_file import port_of_the_service, prepare_to_connect

if TYPE_CHECKING:  # imports Ray, which reads the environment when it is imported
    from rich.console import RenderableType

    from serve_app.config import RouterConfig
    from serve_app.service.connect import ServiceConnection

_TIMEOUT_S = 30.0
_USUAL_PORT = 8000
_NOT_FOUND = 404
_WAYS = (
    "Reading goes over HTTP, changes go over Ray: to the service that this user started with `eesd "
    "serve` (on --port, where there are several), or to the cluster at --address."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """Which service is read or changed."""

    url: Annotated[str | None, "URL of the service, to read (http://127.0.0.1:PORT)"] = None
    port: Annotated[int | None, "port of a service on this machine (your only one, or 8000)"] = None
    address: Annotated[str | None, "Ray cluster of the service, to change it"] = None
    app: Annotated[str, "name of the Serve application"] = "eesd"
    router: Annotated[str | None, "Ray name of the router"] = None
    namespace: Annotated[str | None, "Ray namespace of the router"] = None
    json: Annotated[bool, "JSON instead of a table"] = False

    def router_config(self) -> "RouterConfig":
        return router_named(self.router, self.namespace)

    @contextmanager
    def connected(self) -> "Iterator[ServiceConnection]":
        """Joins the Ray that this user's `eesd serve` has started on the port, or the cluster."""
        address = prepare_to_connect(self.address, port=self.port)
        # Ray reads the environment when it is imported.
        from serve_app.service.connect import service_connection

        with service_connection(address, router=self.router_config(), app_name=self.app) as service:
            yield service

    def show(
        self,
        page: str,
        *,
        shape: Mapping[str, type],
        rendered: "Callable[[Any], Iterable[RenderableType]]",
        key: str | None = None,
    ) -> None:
        """Prints a page of the service, or a part of it, as JSON or as `rendered`.

        `shape` has the keys of the page's JSON object, and their types. Raises EngineError, in one
        line, for every other answer.
        """
        from rich.console import Console

        url = self._url()
        state = _fetched(url, page, shape)
        content = state if key is None else state[key]
        if self.json:
            echo_json(content)
            return
        console = Console()
        try:
            for renderable in rendered(content):
                console.print(renderable)
        except KeyError as error:
            raise _not_ours(url, f"no {error} in its answer") from error

    def page(
        self, page: str, *, shape: Mapping[str, type], absent: str | None = None
    ) -> Mapping[str, Any]:
        """Returns a page of the service. `absent`: what it means if there is no such page."""
        return _fetched(self._url(), page, shape, absent=absent)

    def _url(self) -> str:
        """Returns where to read. A service of a cluster is not among those of this user: without
        one, the usual port is tried."""
        if self.url is not None:
            return self.url
        port = self.port or port_of_the_service() or _USUAL_PORT
        return f"http://127.0.0.1:{port}"


def router_named(name: str | None, namespace: str | None) -> "RouterConfig":
    """Returns the router of these names; None is the default."""
    from serve_app.config import RouterConfig

    names = {"name": name, "namespace": namespace}
    return RouterConfig.model_validate({key: text for key, text in names.items() if text})


def service_group(name: str, show: Callable[[RunningService], None], *, description: str) -> Typer:
    """Builds a group of commands for a running service; without a command, it runs `show`.

    Options may stand before and behind the command; the latter override.
    """

    def before(context: Context, service: RunningService) -> None:
        if context.invoked_subcommand is None:
            show(service)
        else:
            context.default_map = {context.invoked_subcommand: context.params}

    before.__doc__ = f"{description}\n\n{_WAYS}"
    app = group(name, no_args_is_help=False, invoke_without_command=True)
    add_callback(app, before)
    return app


def _fetched(
    url: str, page: str, shape: Mapping[str, type], *, absent: str | None = None
) -> Mapping[str, Any]:
    import httpx

    from serve_app.config import ServiceConfig

    key = os.environ.get(ServiceConfig.model_fields["api_key_env"].default)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}{page}"
    try:
        answer = httpx.get(address, headers=headers, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(
            f"{url}: {error}: is the service running there? Name another one with --url or --port"
        ) from error
    if answer.status_code == _NOT_FOUND and absent is not None:
        raise EngineError(absent)
    if answer.status_code == _NOT_FOUND:
        raise _not_ours(url, f"it has no {page}")
    if not answer.is_success:
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = answer.reason_phrase
        raise EngineError(f"{address}: HTTP {answer.status_code}: {message}")
    try:
        state = answer.json()
    except ValueError as error:
        raise _not_ours(url, "its answer is no JSON") from error
    if not isinstance(state, dict):
        raise _not_ours(url, "its answer is no JSON object")
    for name, kind in shape.items():
        if not isinstance(state.get(name), kind):
            raise _not_ours(url, f"no {name!r} in its answer")
    return state


def _not_ours(url: str, reason: str) -> EngineError:
    return EngineError(
        f"{url} answers, but is no eesd service of this version ({reason}): look at --url or --port"
    )


def echo_json(value: object) -> None:
    echo(json.dumps(value, indent=2))
