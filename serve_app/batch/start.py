"""Starts a batch over an engine in this process, or over a running service."""

import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import with_all_cores
from eesd_dist.model.checkpoint_folder import require_checkpoint
from eesd_dist.model.dtype import resolve_dtype
from eesd_dist.model.weights import weights_digest
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.sampling.noise import NOISE_VERSION
from eesd_dist.text import Tokenizer
from eesd_dist.text.sampling_defaults import SamplingDefaults
from serve_app.batch.http_client import HttpClient
from serve_app.batch.job import BatchOptions, BatchReport, ServedModel, run_batch
from serve_app.batch.local_client import LocalClient, answered_by
from serve_app.batch.loop import AnswerBody, RowLoop, checked_body
from serve_app.config import ServiceConfig
from serve_app.openai.api_settings import ApiSettings
from serve_app.openai.preparation import Preparation
from serve_app.openai.text_service import TextService

_TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that, besides the weights, decide the token ids of a prompt and the end of a text."""


async def run_in_process(
    input_word: str,
    output_word: str,
    *,
    config: ServiceConfig,
    options: BatchOptions,
    concurrency: int,
) -> BatchReport:
    """Runs a batch in this process. Raises ConfigError before any row when something does not
    fit."""
    engine = with_all_cores(config.engine)
    require_checkpoint(engine.model.path)
    max_model_len = layout_of(engine).max_model_len
    preparation = Preparation(
        Tokenizer.load(engine.model.path),
        ApiSettings(
            model_name=config.served_model_name,
            max_model_len=max_model_len,
            max_draft_tokens=engine.speculation.max_draft_tokens,
            sampling_defaults=SamplingDefaults.of_folder(
                engine.model.path, mode=engine.model.generation_config
            ),
        ),
    )

    identity = identity_of(engine, max_model_len=max_model_len)
    model = ServedModel(name=config.served_model_name, identity=identity)

    @asynccontextmanager
    async def execution(options: BatchOptions) -> AsyncIterator[RowLoop]:
        book = BeliefBook(discount=engine.speculation.discount)
        async with aclosing(LocalClient(build_local_engine(engine, book=book))) as client:
            answer = answered_by(TextService(client, preparation))
            yield row_loop(answer, model=model.name, options=options, concurrency=concurrency)

    return await run_batch(
        input_word, output_word, execution=execution, model=model, options=options
    )


async def run_over_http(
    input_word: str,
    output_word: str,
    *,
    url: str,
    api_key: str | None,
    options: BatchOptions,
    concurrency: int,
) -> BatchReport:
    """Runs a batch over a service, which is asked for the model that it lists first where a row
    names none."""
    async with aclosing(HttpClient(url, api_key=api_key)) as client:
        name = await client.model_name()

        @asynccontextmanager
        async def execution(options: BatchOptions) -> AsyncIterator[RowLoop]:
            yield row_loop(client.answer, model=name, options=options, concurrency=concurrency)

        options = replace(options, defaults={"model": name, **options.defaults})
        model = ServedModel(name=name, identity={"model_digest": f"served as {name}"})
        return await run_batch(
            input_word, output_word, execution=execution, model=model, options=options
        )


def row_loop(answer: AnswerBody, *, model: str, options: BatchOptions, concurrency: int) -> RowLoop:
    return RowLoop(
        answer,
        concurrency=concurrency,
        body_of=partial(
            checked_body,
            job_seed=options.seed,
            defaults=options.defaults,
            overrides={"model": model} if options.override_model else {},
        ),
    )


def identity_of(engine: EngineConfig, *, max_model_len: int) -> Mapping[str, object]:
    """Returns digests of the weights, and all else that decides texts. Drafts do not, except with
    rejection sampling; the head is named nevertheless, so that a job has one speed."""
    model = engine.model
    head = model.head or model.path / "exit_head"
    return {
        "model_digest": weights_digest(model.path),
        "text_digest": _digest(
            file for name in _TEXT_FILES if (file := model.path / name).exists()
        ),
        "head_digest": weights_digest(head) if head.is_dir() else "",
        "dtype": str(resolve_dtype(model.dtype, model.path)),
        "numerics": model.numerics,
        "noise": NOISE_VERSION,
        "max_model_len": max_model_len,
        "acceptance": engine.speculation.acceptance,
        "generation_config": str(model.generation_config),
    }


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"\0{file.name} {file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
