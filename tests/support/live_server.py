"""A real HTTP server on a free port, in a thread of the test process."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def serving(app: ASGIApp, *, protocol: type[asyncio.Protocol] | None = None) -> Iterator[str]:
    """Yields the address of the server. `protocol` None is uvicorn's choice."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        lifespan="off",
        http=protocol or "auto",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    _wait_until_started(server)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(timeout=5)


def _wait_until_started(server: uvicorn.Server) -> None:
    deadline_s = time.monotonic() + 10
    while not server.started:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the test's server did not start within 10 s")
        time.sleep(0.01)
