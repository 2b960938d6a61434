"""Puts an engine together from its configuration: which layers go where, and over what they talk.

The only place that knows all the parts of a pipeline. It starts no process and no server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from eesd_dist.config import EngineConfig
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.draft import DraftStage
from eesd_dist.engine.profile import measure_cost
from eesd_dist.engine.spool import SpoolSink
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.errors import ConfigError
from eesd_dist.model.exit_head import ExitHead
from eesd_dist.model.head_config import HeadConfig
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.telemetry.tracing import NO_IDS, SpanIds
from eesd_dist.transport.contracts import (
    RoundHeader,
    TensorGroup,
    VerifyChannel,
    VerifyReply,
)
from eesd_dist.transport.group import SingleGroup
from eesd_dist.transport.memory import MemoryChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What stands where: read once, from the checkpoint's own words."""

    spec: ModelSpec
    head_folder: Path | None
    split: int
    """The draft stage runs layers [0, split)."""
    max_model_len: int
    device: torch.device


def layout_of(config: EngineConfig) -> Layout:
    """Reads the target's and the head's config files, and no weights.

    Raises CheckpointError when they do not fit each other, ConfigError when the wished lengths
    do not fit the model.
    """
    model = config.model
    spec = ModelSpec.from_folder(model.path)
    bundled = model.path / "exit_head"
    folder = model.head if model.head is not None else (bundled if bundled.is_dir() else None)
    split = _split_of(spec, model.path, folder)
    limit = spec.max_position_embeddings
    wished = model.max_model_len or limit
    if wished > limit:
        raise ConfigError(
            f"model.max_model_len is {wished}, the checkpoint's positions end at {limit}: lower it"
        )
    return Layout(
        spec=spec,
        head_folder=folder,
        split=split,
        max_model_len=min(wished, config.cache.num_pages * config.cache.page_size),
        device=_device(model.device),
    )


def _split_of(spec: ModelSpec, path: Path, head_folder: Path | None) -> int:
    """Where the head says; without one nothing is drafted, and an eighth of the layers will do."""
    if head_folder is None:
        return max(1, spec.num_layers // 8)
    return HeadConfig.read(head_folder, target=spec, target_path=path).exit_layer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is cuda and torch sees no CUDA device: use auto or cpu")
    return torch.device(name)


def build_draft_stage(config: EngineConfig, layout: Layout, group: TensorGroup) -> DraftStage:
    model, cache = config.model, config.cache
    span = LlamaSpan.load(
        model.path,
        layout.spec,
        0,
        layout.split,
        group=group,
        dtype=model.dtype,
        numerics=model.numerics,
        device=layout.device,
        num_pages=cache.num_pages,
        page_size=cache.page_size,
    )
    head = None
    if layout.head_folder is not None and config.speculation.max_draft_tokens > 0:
        head = load_exit_head(config, layout, layout.head_folder)
    return DraftStage(
        span=span,
        head=head,
        page_size=cache.page_size,
        device=layout.device,
        numerics=model.numerics,
        rejection=config.speculation.acceptance == "rejection",
        log_evidence=config.speculation.log_evidence,
        tree=config.speculation.tree,
    )


def load_exit_head(config: EngineConfig, layout: Layout, folder: Path) -> ExitHead:
    """Raises CheckpointError for a head that is damaged or does not fit the target."""
    model, cache = config.model, config.cache
    return ExitHead.load(
        folder,
        target=layout.spec,
        target_path=model.path,
        dtype=model.dtype,
        numerics=model.numerics,
        device=layout.device,
        num_pages=cache.num_pages,
        page_size=cache.page_size,
    )


def build_verify_stage(config: EngineConfig, group: TensorGroup) -> VerifyStage:
    """One verify rank: layers [split, L), final norm and this rank's share of the LM head."""
    layout = layout_of(config)
    span = LlamaSpan.load(
        config.model.path,
        layout.spec,
        layout.split,
        layout.spec.num_layers,
        group=group,
        dtype=config.model.dtype,
        numerics=config.model.numerics,
        device=layout.device,
        num_pages=config.cache.num_pages,
        page_size=config.cache.page_size,
    )
    return VerifyStage(
        span=span,
        group=group,
        page_size=config.cache.page_size,
        device=layout.device,
        numerics=config.model.numerics,
    )


def build_draft_engine(
    config: EngineConfig,
    channel: VerifyChannel,
    *,
    generation: int = 0,
    book: BeliefBook | None = None,
    cost: CostModel | None = None,
    clock: Callable[[], float] = monotonic,
    round_span: Callable[[Sequence[str | None]], SpanIds] = lambda _: NO_IDS,
    spool: SpoolSink | None = None,
) -> EngineCore:
    """The drafting actor's engine: draft stage, page tables and scheduler, over any channel.

    Without a `cost` the draft step and the verify pass are measured now, through the channel.
    """
    layout = layout_of(config)
    draft = build_draft_stage(config, layout, SingleGroup())
    if cost is None and draft.head is not None:
        cost = _cost_of(config, draft, channel, generation=generation)
    pages = PageAllocator(
        num_pages=config.cache.num_pages,
        page_size=config.cache.page_size,
        prefix_caching=config.cache.prefix_caching,
    )
    scheduler = Scheduler(
        config=config.scheduler,
        pages=pages,
        max_model_len=layout.max_model_len,
        max_draft_tokens=config.speculation.max_draft_tokens if draft.head is not None else 0,
        vocab_size=layout.spec.vocab_size,
        clock=clock,
        tree=config.speculation.tree,
    )
    return EngineCore(
        draft=draft,
        channel=channel,
        scheduler=scheduler,
        speculation=config.speculation,
        cost=cost,
        calibrator=Calibrator.load(layout.head_folder) if layout.head_folder else None,
        book=book,
        generation=generation,
        round_span=round_span,
        spool=spool,
    )


def _cost_of(
    config: EngineConfig, draft: DraftStage, channel: VerifyChannel, *, generation: int
) -> CostModel:
    """The pinned cost model, or one measured now."""
    if config.speculation.cost_file is not None:
        return CostModel.load(config.speculation.cost_file.expanduser())
    return measure_cost(
        draft,
        channel,
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        max_draft_tokens=config.speculation.max_draft_tokens,
        max_running=config.scheduler.max_running,
        generation=generation,
    )


def build_local_engine(
    config: EngineConfig,
    *,
    book: BeliefBook | None = None,
    cost: CostModel | None = None,
    spool: SpoolSink | None = None,
) -> EngineCore:
    """Both stages in this process, over a channel in memory.

    Nothing overlaps here, so one cohort keeps the batches whole.
    """
    if config.parallel.verify_tensor_parallel_size != 1:
        raise ConfigError(
            "one process holds one verify rank: leave parallel.verify_tensor_parallel_size at 1, "
            "or start the service"
        )
    torch.set_num_threads(config.parallel.num_threads)
    config = config.model_copy(
        update={
            "scheduler": config.scheduler.model_copy(update={"overlap": False}),
            "speculation": config.speculation.model_copy(update={"draft_ahead": False}),
        }
    )
    stage = build_verify_stage(config, SingleGroup())

    def verify(
        header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None
    ) -> VerifyReply:
        return stage.verify(header, hidden_TD, draft_probs_KV)

    return build_draft_engine(config, MemoryChannel(verify), book=book, cost=cost, spool=spool)
