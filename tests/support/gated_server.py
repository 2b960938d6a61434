"""The whole API over a toy engine, in a process of its own, so that a client does not slow it."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import httpx
import uvicorn

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.text import Tokenizer
from serve_app.config import LimitsConfig
from serve_app.ingress.bounded_connection import BoundedConnection
from serve_app.openai.api_settings import limits_of
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

_START_S = 60.0


@contextmanager
def gated_server(
    *, max_model_len: int = 2048, read_timeout_s: float = 20.0, head_timeout_s: float = 20.0
) -> Iterator[int]:
    """Yields the port."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    arguments = (sender, max_model_len, read_timeout_s, head_timeout_s)
    process = spawn.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    try:
        assert receiver.poll(_START_S), "the server has not started"
        yield receiver.recv()
    finally:
        process.terminate()
        process.join(10)
        receiver.close()
        sender.close()


def num_live(port: int) -> int:
    """Returns the live requests of the engine."""
    num_requests: int = httpx.get(f"http://127.0.0.1:{port}/debug/toy").json()["num_live"]
    return num_requests


def _serve(
    pipe: Connection, max_model_len: int, read_timeout_s: float, head_timeout_s: float
) -> None:
    from serve_app.ingress import bounded_connection

    bounded_connection.HEAD_TIMEOUT_S = head_timeout_s
    tokenizer = Tokenizer.load(BUNDLED_MODEL, max_tokens=max_model_len)
    engine = ToyEngine(vocab_size=tokenizer.vocab_size, delay_s=0.001)

    async def toy() -> dict[str, int]:
        return {"num_live": engine.num_live}

    app = toy_api(
        engine,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        limits=limits_of(
            LimitsConfig(read_timeout_s=read_timeout_s),
            max_model_len=max_model_len,
            max_running=32,
        ),
    )
    app.add_api_route("/debug/toy", toy, methods=["GET"])
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", http=BoundedConnection)
    asyncio.run(_run(uvicorn.Server(config), pipe))


async def _run(server: uvicorn.Server, pipe: Connection) -> None:
    serving = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    pipe.send(server.servers[0].sockets[0].getsockname()[1])
    await serving
