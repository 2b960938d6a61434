"""The HTTP API of a toy engine, which is always well and has no metrics."""

from typing import Any

from fastapi import FastAPI

from serve_app.config import LimitsConfig
from serve_app.openai.api import build_api
from serve_app.openai.limits import limits_of
from tests.support.toy_codec import ByteCodec
from tests.support.toy_engine import ToyEngine


async def _well() -> str | None:
    return None


async def _no_metrics() -> bytes:
    return b""


def toy_api(engine: ToyEngine, *, max_model_len: int, **options: Any) -> FastAPI:
    """`options` are those of `build_api` that differ: tokenizer, model_name, limits, api_key."""
    defaults = {
        "tokenizer": ByteCodec(),
        "model_name": "toy",
        "limits": limits_of(LimitsConfig(), max_model_len=max_model_len, max_running=32),
        "health": _well,
        "metrics": _no_metrics,
    }
    return build_api(engine, max_model_len=max_model_len, **(defaults | options))
