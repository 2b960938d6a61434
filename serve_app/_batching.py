"""`eesd batch`: a file of requests over an engine in this process, or over a running service."""

import asyncio
import hashlib
from contextlib import aclosing
from pathlib import Path

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_local_engine, layout_of
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.text import Tokenizer
from serve_app._http_client import HttpClient
from serve_app._local_client import LocalClient
from serve_app.batch import BatchOptions, BatchReport, ServedModel, run_batch
from serve_app.config import ServiceConfig

_HASHED_WHOLE_BYTES = 2**28


def run_here(
    input_file: Path, output_file: Path, *, config: ServiceConfig, options: BatchOptions
) -> BatchReport:
    """Raises ConfigError before any row is run when something does not fit."""
    return asyncio.run(_here(input_file, output_file, config, options))


def run_there(
    input_file: Path,
    output_file: Path,
    *,
    url: str,
    api_key: str | None,
    config: ServiceConfig,
    options: BatchOptions,
) -> BatchReport:
    """`config` names the folder of the tokenizer, which has to be the service's own."""
    return asyncio.run(_there(input_file, output_file, url, api_key, config, options))


async def _here(
    input_file: Path, output_file: Path, config: ServiceConfig, options: BatchOptions
) -> BatchReport:
    engine = config.engine
    tokenizer = Tokenizer.load(engine.model.path)
    model = ServedModel(
        name=config.served_model_name,
        identity=_identity(engine),
        max_model_len=layout_of(engine).max_model_len,
        max_draft_tokens=engine.speculation.max_draft_tokens,
    )
    book = BeliefBook(discount=engine.speculation.discount)
    async with aclosing(LocalClient(build_local_engine(engine, book=book))) as client:
        return await run_batch(
            input_file,
            output_file,
            engine=client,
            tokenizer=tokenizer,
            model=model,
            options=options,
        )


async def _there(
    input_file: Path,
    output_file: Path,
    url: str,
    api_key: str | None,
    config: ServiceConfig,
    options: BatchOptions,
) -> BatchReport:
    tokenizer = Tokenizer.load(config.engine.model.path)
    async with aclosing(HttpClient(url, model="", api_key=api_key)) as asking:
        card = await asking.model_card()
    model = ServedModel(
        name=card["id"],
        identity=f"served as {card['id']}",
        max_model_len=card["max_model_len"],
        max_draft_tokens=config.engine.speculation.max_draft_tokens,
    )
    async with aclosing(HttpClient(url, model=model.name, api_key=api_key)) as client:
        return await run_batch(
            input_file,
            output_file,
            engine=client,
            tokenizer=tokenizer,
            model=model,
            options=options,
        )


def _identity(engine: EngineConfig) -> str:
    """A digest of the weights and of what else decides texts; the draft stage does not."""
    digest = hashlib.sha256(f"{engine.model.dtype} {engine.model.numerics}".encode())
    for file in sorted((*engine.model.path.glob("*.safetensors"), *_configs(engine.model.path))):
        digest.update(f"\0{file.name} {file.stat().st_size}\0".encode())
        if file.stat().st_size <= _HASHED_WHOLE_BYTES:
            digest.update(file.read_bytes())
        else:
            digest.update(str(file.stat().st_mtime_ns).encode())
    return digest.hexdigest()


def _configs(folder: Path) -> list[Path]:
    return [folder / name for name in ("config.json", "tokenizer.json") if (folder / name).exists()]
