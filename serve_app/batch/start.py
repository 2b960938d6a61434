"""Starts a batch over an engine in this process, or over a running service."""

import hashlib
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_local_engine, layout_of
from eesd_dist.model.checkpoint_folder import require_checkpoint
from eesd_dist.model.dtype import resolve_dtype
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.sampling.noise import NOISE_VERSION
from eesd_dist.text import Tokenizer
from eesd_dist.text.sampling_defaults import SamplingDefaults
from serve_app.batch.http_client import HttpClient
from serve_app.batch.local_client import LocalClient
from serve_app.batch.runner import BatchOptions, BatchReport, ServedModel, run_batch
from serve_app.config import ServiceConfig

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


async def run_here(
    input_file: Path, output_file: Path, *, config: ServiceConfig, options: BatchOptions
) -> BatchReport:
    """Runs a batch in this process. Raises ConfigError before any row when something does not
    fit."""
    engine = config.engine
    require_checkpoint(engine.model.path)
    model = ServedModel(
        name=config.served_model_name,
        identity=_identity(engine),
        max_model_len=layout_of(engine).max_model_len,
        max_draft_tokens=engine.speculation.max_draft_tokens,
        sampling_defaults=SamplingDefaults.of_folder(
            engine.model.path, mode=engine.model.generation_config
        ),
    )
    book = BeliefBook(discount=engine.speculation.discount)
    tokenizer = Tokenizer.load(engine.model.path)
    async with aclosing(LocalClient(build_local_engine(engine, book=book))) as client:
        return await run_batch(
            *(input_file, output_file),
            engine=client,
            tokenizer=tokenizer,
            model=model,
            options=options,
        )


async def run_there(
    input_file: Path,
    output_file: Path,
    *,
    url: str,
    api_key: str | None,
    config: ServiceConfig,
    options: BatchOptions,
) -> BatchReport:
    """Runs a batch over a service. `config` names the folder of the service's tokenizer."""
    tokenizer = Tokenizer.load(config.engine.model.path)
    async with aclosing(HttpClient(url, model="", api_key=api_key)) as asking:
        card = await asking.model_card()
    model = ServedModel(
        name=card.name,
        identity=_identity_there(card.name, config.engine.model.path),
        max_model_len=card.max_model_len,
        max_draft_tokens=config.engine.speculation.max_draft_tokens,
    )
    async with aclosing(HttpClient(url, model=model.name, api_key=api_key)) as client:
        return await run_batch(
            *(input_file, output_file),
            engine=client,
            tokenizer=tokenizer,
            model=model,
            options=options,
        )


def _identity(engine: EngineConfig) -> str:
    """Returns a digest of the weights and of all else that decides texts.

    Drafts do not, except with rejection sampling, which draws other tokens after them.
    """
    model = engine.model
    words = f"{resolve_dtype(model.dtype, model.path)} {model.numerics} noise {NOISE_VERSION}"
    if engine.speculation.acceptance == "rejection":
        words += " rejection"
    if model.generation_config != "auto":
        words += f" generation_config {model.generation_config}"
    weights = sorted(model.path.glob("*.safetensors"))
    return _digest(words, (*weights, *_text_files(model.path)))


def _identity_there(name: str, folder: Path) -> str:
    """Returns the model's name, all that is known of it, and a digest of the local tokenizer."""
    return f"served as {name}, text by {_digest('', _text_files(folder))}"


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
