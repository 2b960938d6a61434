"""Starts a batch over an engine in this process, or over a running service."""

import hashlib
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import with_all_cores
from eesd_dist.model.checkpoint_folder import require_checkpoint
from eesd_dist.model.dtype import resolve_dtype
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.sampling.noise import NOISE_VERSION
from eesd_dist.text import Tokenizer
from eesd_dist.text.sampling_defaults import SamplingDefaults
from serve_app.batch.http_client import HttpClient
from serve_app.batch.local_client import LocalClient, answered_by
from serve_app.batch.runner import BatchOptions, BatchReport, ServedModel, run_batch
from serve_app.config import ServiceConfig
from serve_app.openai.api_settings import ApiSettings
from serve_app.openai.preparation import Preparation
from serve_app.openai.text_service import TextService

_HASHED_WHOLE_BYTES = 2**28
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that, besides the model's shape, decide the token ids of a prompt and the end of a text."""


async def run_in_process(
    input_file: Path, output_file: Path, *, config: ServiceConfig, options: BatchOptions
) -> BatchReport:
    """Runs a batch in this process. Raises ConfigError before any row when something does not
    fit."""
    engine = with_all_cores(config.engine)
    require_checkpoint(engine.model.path)
    max_model_len = layout_of(engine).max_model_len
    model = ServedModel(
        name=config.served_model_name, identity=_identity(engine, max_model_len=max_model_len)
    )
    tokenizer = Tokenizer.load(engine.model.path)
    preparation = Preparation(
        tokenizer,
        ApiSettings(
            model_name=model.name,
            max_model_len=max_model_len,
            max_draft_tokens=engine.speculation.max_draft_tokens,
            sampling_defaults=SamplingDefaults.of_folder(
                engine.model.path, mode=engine.model.generation_config
            ),
        ),
    )
    book = BeliefBook(discount=engine.speculation.discount)
    async with aclosing(LocalClient(build_local_engine(engine, book=book))) as client:
        answer = answered_by(TextService(client, preparation))
        return await run_batch(
            *(input_file, output_file), answer=answer, model=model, options=options
        )


async def run_over_http(
    input_file: Path, output_file: Path, *, url: str, api_key: str | None, options: BatchOptions
) -> BatchReport:
    """Runs a batch over a service, which is asked for the model that it lists first where a row
    names none."""
    async with aclosing(HttpClient(url, api_key=api_key)) as client:
        name = await client.model_name()
        model = ServedModel(name=name, identity=f"served as {name}")
        options = replace(options, defaults={"model": name, **options.defaults})
        return await run_batch(
            *(input_file, output_file), answer=client.answer, model=model, options=options
        )


def _identity(engine: EngineConfig, *, max_model_len: int) -> str:
    """Returns a digest of the weights and of all else that decides texts.

    Drafts do not, except with rejection sampling, which draws other tokens after them.
    """
    model = engine.model
    words = f"{resolve_dtype(model.dtype, model.path)} {model.numerics} noise {NOISE_VERSION}"
    words += f" length {max_model_len}"
    if engine.speculation.acceptance == "rejection":
        words += " rejection"
    if model.generation_config != "auto":
        words += f" generation_config {model.generation_config}"
    weights = sorted(model.path.glob("*.safetensors"))
    return _digest(words, (*weights, *_text_files(model.path)))


def _digest(words: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(words.encode())
    for file in files:
        digest.update(f"\0{file.name} {file.stat().st_size}\0".encode())
        if file.stat().st_size <= _HASHED_WHOLE_BYTES:
            digest.update(file.read_bytes())
        else:
            digest.update(str(file.stat().st_mtime_ns).encode())
    return digest.hexdigest()


def _text_files(folder: Path) -> list[Path]:
    return [folder / name for name in _TEXT_FILES if (folder / name).exists()]
