"""Waiting for a service to become healthy, and what it waits for: `eesd wait`."""

import re
import time
from collections.abc import Callable
from http import HTTPStatus

import httpx

from eesd_dist.errors import EesdError, EngineError

Failure = Callable[[], EesdError | None]
"""Returns why the application will not become healthy; None while it may."""

_POLL_S = 1.0
_ANSWER_S = 15.0
_NUMBERS = re.compile(r"\d+(\.\d+)?")
"""Times and progress in a reason, which change at every look."""


class ChangedReason:
    """Tells which reasons to show: those that differ from the last one in more than numbers."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last_kind = ""

    def __call__(self, reason: str) -> None:
        kind = _NUMBERS.sub("", reason)
        if reason and kind != self._last_kind:
            self._say(reason)
        self._last_kind = kind


def wait_until_healthy(
    url: str,
    *,
    timeout_s: float | None,
    say: Callable[[str], None],
    failure: Failure = lambda: None,
) -> None:
    """Returns when `GET /health` of the service answers 200; says what it waits for until then.

    Raises EngineError at the timeout, and what `failure` returns as soon as it returns an error.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    tell = ChangedReason(say)
    while reason := _why_unhealthy(url):
        if (error := failure()) is not None:
            raise error
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise EngineError(f"{url} is not healthy after {timeout_s:g} s: {reason}")
        tell(reason)
        time.sleep(_POLL_S)


def _why_unhealthy(url: str) -> str:
    """Returns an empty string for a healthy service."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/health", timeout=_ANSWER_S)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise EngineError(f"{url}: {error}: look at --url") from error
    except httpx.HTTPError as error:
        return f"no answer ({error or type(error).__name__}): its HTTP proxy does not run yet"
    if answer.is_success:
        return ""
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return "Serve runs there, and the application is not deployed yet"
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code} {answer.reason_phrase}"
