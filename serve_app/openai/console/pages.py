"""The files of the web pages, as a browser gets them.

They have no data of the service: what they show they read from the API, with its key. Nothing is
loaded from another origin, and scripts and styles are files of their own.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

_SAME_ORIGIN = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
)
CONSOLE_POLICY = (
    f"{_SAME_ORIGIN}style-src 'self'; img-src 'self'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Policy of the console, and of all other files. Text never becomes markup: the browser refuses
it."""
DOCS_POLICY = f"{_SAME_ORIGIN}style-src 'self' 'unsafe-inline'; img-src 'self' data:"
"""Swagger UI sets styles on its elements, and its pictures are in its style sheet."""
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_STATIC = files("serve_app.openai.console") / "static"
_SWAGGER = files("fastapi_offline") / "static"
_FILES: Mapping[str, Traversable] = {
    "/console": _STATIC / "console.html",
    "/docs": _STATIC / "docs.html",
    "/docs/docs.js": _STATIC / "docs.js",
    "/docs/swagger-ui-bundle.js": _SWAGGER / "swagger-ui-bundle.js",
    "/docs/swagger-ui.css": _SWAGGER / "swagger-ui.css",
} | {
    f"/console/{file.name}": file
    for file in _STATIC.iterdir()
    if not file.name.startswith("docs.") and not file.name.endswith(".html")
}
PATHS = frozenset(_FILES) | {"/", "/console/", "/docs/"}
"""Paths that need no key; the last three are redirected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A file, with the headers of its answer."""

    content: bytes
    headers: Mapping[str, str]

    def answer(self, request: Request) -> Response:
        """Returns the file, or 304 to a browser that has it."""
        if self.headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def add_pages(app: FastAPI) -> None:
    """Adds a route for each file; `/` leads to the console."""
    app.add_route("/", _to_console, methods=["GET"], include_in_schema=False)
    for path in _FILES:
        app.add_route(path, _answer, methods=["GET"], include_in_schema=False)


async def _to_console(request: Request) -> Response:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/console")


async def _answer(request: Request) -> Response:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return _page(path).answer(request)


@cache
def _page(path: str) -> Page:
    file = _FILES[path]
    content = file.read_bytes()
    return Page(content=content, headers=dict(_headers(path, file.name, content)))


def _headers(path: str, name: str, content: bytes) -> Iterator[tuple[str, str]]:
    yield "Content-Type", _TYPES[PurePosixPath(name).suffix]
    yield "ETag", f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    yield "Cache-Control", "no-cache"  # a new version is seen at once
    yield "Content-Security-Policy", DOCS_POLICY if path == "/docs" else CONSOLE_POLICY
    yield "X-Content-Type-Options", "nosniff"
    yield "X-Frame-Options", "DENY"
    yield "Referrer-Policy", "no-referrer"
