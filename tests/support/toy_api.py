"""The HTTP API of a toy engine, which is always well and has no metrics."""

from dataclasses import fields
from typing import Any

from fastapi import FastAPI

from serve_app.config import LimitsConfig
from serve_app.openai.api import build_api
from serve_app.openai.api_settings import ApiSettings, limits_of
from serve_app.openai.keys import KeyRing, operators_key
from serve_app.openai.preparation import Preparation
from tests.support.toy_codec import ByteCodec
from tests.support.toy_engine import ToyEngine

_SETTINGS = [field.name for field in fields(ApiSettings)]


async def _well() -> str | None:
    return None


async def _no_metrics() -> bytes:
    return b""


def toy_settings(**options: Any) -> ApiSettings:
    """Returns settings of a toy model; `options` are those that differ."""
    return ApiSettings(**({"model_name": "toy", "max_model_len": 100} | options))


def toy_preparation(**options: Any) -> Preparation:
    """Returns a preparation for a toy model; `options` are those of settings, `limits` and
    `kv_tokens`."""
    collaborators = {name: options.pop(name) for name in ("limits", "kv_tokens") if name in options}
    return Preparation(ByteCodec(), toy_settings(**options), **collaborators)


def toy_api(
    engine: ToyEngine, *, max_model_len: int, api_key: str | None = None, **options: Any
) -> FastAPI:
    """Returns the API. `options` are those of its settings and of `build_api` that differ; an
    `api_key` becomes the only key unless there are `keys`, and signs the ids of events."""
    settings = {name: options.pop(name) for name in _SETTINGS if name in options}
    if api_key is not None:
        settings["event_key"] = api_key.encode()
        options.setdefault("keys", KeyRing(operators_key(api_key)))
    collaborators = {
        "tokenizer": ByteCodec(),
        "limits": limits_of(LimitsConfig(), max_model_len=max_model_len, max_running=32),
        "health": _well,
        "metrics": _no_metrics,
    }
    return build_api(
        engine,
        toy_settings(max_model_len=max_model_len, **settings),
        **(collaborators | options),
    )
