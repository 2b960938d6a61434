"""What the commands that look at a running service share: their flags, and its pages.

Whatever else may answer at the URL is told from a service of this version, in one line.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import httpx

from eesd_dist.errors import EngineError
from serve_app.config import RouterConfig, ServiceConfig

_TIMEOUT_S = 30.0
_NOT_FOUND = 404


def add_service(parser: argparse.ArgumentParser, *, is_top: bool) -> None:
    """The same flags before and behind the action; what is not given behind it changes nothing."""

    def add(flag: str, default: object, **how: Any) -> None:
        parser.add_argument(flag, default=default if is_top else argparse.SUPPRESS, **how)

    add("--url", None, help="the service's URL, to look (http://127.0.0.1:PORT)")
    add("--port", 8000, type=int, help="port of a service on this machine (8000)")
    add("--address", None, help="Ray cluster the service runs on, to change something there")
    add("--app", "eesd", help="name of the Serve application (eesd)")
    add("--router", RouterConfig().name, help="the router's Ray name")
    add("--namespace", RouterConfig().namespace, help="the router's Ray namespace")
    add("--json", False, action="store_true", help="JSON instead of a table")


def url_of(options: argparse.Namespace) -> str:
    return options.url or f"http://127.0.0.1:{options.port}"


def fetched(url: str, page: str, *, shape: Mapping[str, type]) -> Mapping[str, Any]:
    """The page's JSON object, which has at least the keys of `shape`, of these types."""
    key = os.environ.get(ServiceConfig.model_fields["api_key_env"].default)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}{page}"
    try:
        answer = httpx.get(address, headers=headers, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"{url}: {error}: is the service running there?") from error
    if answer.status_code == _NOT_FOUND:
        raise not_ours(url, f"it has no {page}")
    if not answer.is_success:
        raise EngineError(f"{address}: HTTP {answer.status_code}: {_said(answer)}")
    try:
        state = answer.json()
    except ValueError as error:
        raise not_ours(url, "its answer is no JSON") from error
    if not isinstance(state, dict):
        raise not_ours(url, "its answer is no JSON object")
    for name, kind in shape.items():
        if not isinstance(state.get(name), kind):
            raise not_ours(url, f"no {name!r} in its answer")
    return state


def not_ours(url: str, found: str) -> EngineError:
    return EngineError(
        f"{url} answers, but is no eesd service of this version ({found}): look at --url or --port"
    )


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase
