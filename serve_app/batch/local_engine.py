"""A model with its engine in one process, and what its texts depend on."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_local_engine
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.layout import layout_of
from eesd_dist.model.checkpoint_folder import require_checkpoint
from eesd_dist.model.dtype import resolve_dtype
from eesd_dist.model.weights import weights_digest
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.sampling.noise import NOISE_VERSION
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.text import Tokenizer
from eesd_dist.text.sampling_defaults import SamplingDefaults
from serve_app.batch.job import ServedModel
from serve_app.openai.api_settings import ApiSettings
from serve_app.openai.preparation import Preparation

_TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that, besides the weights, decide the token ids of a prompt and the end of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model of which this process can build the engine."""

    engine: EngineConfig
    name: str
    preparation: Preparation

    @classmethod
    def load(cls, engine: EngineConfig, *, name: str) -> "LocalModel":
        """Raises ConfigError where there is no such model."""
        path = engine.model.path
        require_checkpoint(path)
        settings = ApiSettings(
            model_name=name,
            max_model_len=layout_of(engine).max_model_len,
            max_draft_tokens=engine.speculation.max_draft_tokens,
            sampling_defaults=SamplingDefaults.of_folder(path, mode=engine.model.generation_config),
        )
        preparation = Preparation(Tokenizer.load(path), settings)
        return cls(engine=engine, name=name, preparation=preparation)

    def build(self, tracing: Tracing) -> EngineCore:
        """Builds the engine, with spans of its rounds where tracing is on."""
        book = BeliefBook(discount=self.engine.speculation.discount)
        trace_round = None if tracing.rounds is None else tracing.rounds.trace_round
        return build_local_engine(self.engine, book=book, trace_round=trace_round)

    @property
    def served(self) -> ServedModel:
        max_model_len = layout_of(self.engine).max_model_len
        identity = identity_of(self.engine, max_model_len=max_model_len)
        return ServedModel(name=self.name, identity=identity)


def with_room_for(num_rows: int, engine: EngineConfig) -> EngineConfig:
    """Returns the configuration of an engine that computes so many rows at a time, unless it states
    `scheduler.max_running`. It changes no text."""
    scheduler = engine.scheduler
    if "max_running" in scheduler.model_fields_set:
        return engine
    scheduler = scheduler.model_copy(update={"max_running": num_rows})
    return engine.model_copy(update={"scheduler": scheduler})


def identity_of(engine: EngineConfig, *, max_model_len: int) -> Mapping[str, object]:
    """Returns digests of the weights, and all else that decides texts. Drafts do not, except with
    rejection sampling; the head is named nevertheless, so that a job has one speed."""
    model, kv_dtype = engine.model, engine.cache.kv_cache_dtype
    head = model.head or model.path / "exit_head"
    return {
        "model_digest": weights_digest(model.path),
        "text_digest": _digest(
            file for name in _TEXT_FILES if (file := model.path / name).exists()
        ),
        "head_digest": weights_digest(head) if head.is_dir() else "",
        "dtype": str(resolve_dtype(model.dtype, model.path)),
        "numerics": model.numerics,
        "draft_tp": engine.parallel.draft_tensor_parallel_size,
        "verify_tp": engine.parallel.verify_tensor_parallel_size,
        "page_size": engine.cache.page_size,
        "noise": NOISE_VERSION,
        "max_model_len": max_model_len,
        "acceptance": engine.speculation.acceptance,
        "generation_config": str(model.generation_config),
        **({} if kv_dtype == "auto" else {"kv_cache_dtype": kv_dtype}),
    }


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"\0{file.name} {file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
