"""Builds an engine from its configuration: stages, their layers, and the channel between them.

The only module that depends on all parts of a pipeline. It starts no process and no server.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import torch

from eesd_dist.backends.api import engine_on
from eesd_dist.config import EngineConfig
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.overlap_policy import OverlapPolicy
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.drafting.ranks import DraftCompute, DraftShard, HeadShelf, LeadingShard
from eesd_dist.engine.drafting.stage import DraftStage
from eesd_dist.engine.headers import TraceRound
from eesd_dist.engine.kv_room import fallback_bytes, held_bytes_of, kv_room
from eesd_dist.engine.layout import Layout, layout_of
from eesd_dist.engine.masks import Masks
from eesd_dist.engine.profile import measure_cost
from eesd_dist.engine.recording.recorder import RecorderSink
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.exit_head import ExitHead, HeadWeights
from eesd_dist.model.loading import OnProgress, release_memory, unwatched
from eesd_dist.model.parallel import Shard
from eesd_dist.model.rank_memory import kv_page_bytes
from eesd_dist.model.span import SpanWeights
from eesd_dist.routing.beliefs import BeliefBook
from eesd_dist.schedule.kv_pages import KvRoom, num_pages_of
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.text import Tokenizer
from eesd_dist.text.grammars import GrammarCompiler
from eesd_dist.text.sampling_defaults import SamplingDefaults
from eesd_dist.transport.command_stream import CommandSink
from eesd_dist.transport.contracts import (
    TensorGroup,
    VerifyChannel,
)
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import GroupHandle, SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import NO_TRAFFIC, LoadProgress, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """Weights of one draft rank in memory, without pages."""

    span: SpanWeights
    head: HeadWeights | None
    """None: this rank drafts nothing."""
    room: KvRoom
    config: EngineConfig

    def shard(self, *, num_pages: int, compiles_in_background: bool = False) -> DraftShard:
        """Allocates the pages of the layers and of the exit head."""
        page_size = self.config.cache.page_size
        head = self.head
        return DraftShard(
            span=self.span.span(num_pages=num_pages, page_size=page_size),
            head=None if head is None else head.head(num_pages=num_pages, page_size=page_size),
            group=self.span.group,
            num_pages=num_pages,
            page_size=page_size,
            device=self.span.layers.device,
            numerics=self.config.model.numerics,
            compiles_in_background=compiles_in_background,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyWeights:
    """Weights of one verify rank in memory, without pages."""

    span: SpanWeights
    room: KvRoom
    config: EngineConfig

    def stage(self, *, num_pages: int, compiles_in_background: bool = False) -> VerifyStage:
        """Allocates the pages."""
        page_size = self.config.cache.page_size
        return VerifyStage(
            span=self.span.span(num_pages=num_pages, page_size=page_size),
            group=self.span.group,
            page_size=page_size,
            device=self.span.layers.device,
            numerics=self.config.model.numerics,
            compiles_in_background=compiles_in_background,
        )


def load_draft_weights(
    config: EngineConfig,
    layout: Layout,
    group: TensorGroup,
    *,
    on_progress: OnProgress = unwatched,
) -> DraftWeights:
    """Loads one draft rank: its part of layers [0, split) and of the exit head.

    In the progress the exit head is one piece with the full size of its files; it is reported last,
    when everything that the shard needs is in memory.
    """
    folder = layout.head_folder if config.speculation.max_draft_tokens > 0 else None
    head_bytes = 0 if folder is None else _stored_bytes(folder)
    began_s, span_bytes, waited_s = monotonic(), 0, 0.0

    def tell(progress: LoadProgress) -> None:
        nonlocal span_bytes, waited_s
        span_bytes, waited_s = progress.bytes_total, progress.waited_s
        on_progress(replace(progress, bytes_total=span_bytes + head_bytes))

    engine_on(layout.device).warm_up()
    span = _load_span(config, layout, 0, layout.split, group=group, on_progress=tell)
    page_size = config.cache.page_size
    head, page_bytes = None, span.layers.kv_page_bytes(page_size)
    if folder is not None:
        head = _load_head(config, layout, folder, group=group)
        release_memory()
        page_bytes += head.layers.kv_page_bytes(page_size)
        total = span_bytes + head_bytes
        seconds = monotonic() - began_s
        on_progress(
            LoadProgress(
                bytes_done=total,
                bytes_total=total,
                piece="exit head",
                seconds=seconds,
                waited_s=waited_s,
            )
        )
    room = kv_room(config, span.layers, page_bytes=page_bytes)
    return DraftWeights(span=span, head=head, room=room, config=config)


def build_draft_shard(config: EngineConfig, layout: Layout, group: TensorGroup) -> DraftShard:
    """Builds one draft rank, with as many pages as it has room for alone."""
    weights = load_draft_weights(config, layout, group)
    return weights.shard(num_pages=num_pages_of(config, {"the draft rank": weights.room}))


def _load_span(
    config: EngineConfig,
    layout: Layout,
    first: int,
    last: int,
    *,
    group: TensorGroup,
    on_progress: OnProgress,
) -> SpanWeights:
    return SpanWeights.load(
        config.model.path,
        layout.spec,
        first,
        last,
        group=group,
        dtype=layout.dtype,
        numerics=config.model.numerics,
        device=layout.device,
        kv_cache_dtype=layout.kv_cache_dtype,
        on_progress=on_progress,
    )


def _stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def head_shelf(config: EngineConfig, layout: Layout, group: TensorGroup) -> HeadShelf:
    """Builds the shelf from which a draft follower takes its part of other exit heads."""
    return HeadShelf(lambda folder: load_next_head(config, layout, folder, group=group))


def _draft_stage(config: EngineConfig, layout: Layout, compute: DraftCompute) -> DraftStage:
    return DraftStage(
        compute=compute,
        page_size=config.cache.page_size,
        device=layout.device,
        rejection=config.speculation.acceptance == "rejection",
        log_evidence=config.speculation.log_evidence,
        tree=config.speculation.tree,
    )


def load_next_head(
    config: EngineConfig, layout: Layout, folder: Path, *, group: TensorGroup
) -> ExitHead:
    """Loads this rank's part of a head that replaces another one and takes over its pages: it
    allocates one page only.

    Raises CheckpointError for a head that is damaged or does not fit the target.
    """
    weights = _load_head(config, layout, folder, group=group)
    return weights.head(num_pages=1, page_size=config.cache.page_size)


def _load_head(
    config: EngineConfig, layout: Layout, folder: Path, *, group: TensorGroup
) -> HeadWeights:
    return HeadWeights.load(
        folder,
        target=layout.spec,
        target_path=config.model.path,
        dtype=layout.dtype,
        numerics=config.model.numerics,
        device=layout.device,
        kv_cache_dtype=layout.kv_cache_dtype,
        group=group,
    )


def load_verify_weights(
    config: EngineConfig, group: TensorGroup, *, on_progress: OnProgress = unwatched
) -> VerifyWeights:
    """Loads one verify rank: its part of layers [split, L), final norm and LM head.

    Its room for pages leaves out what the weights of a fallback in its process will take, and its
    pages have the fallback's layers too.
    """
    layout, parallel = layout_of(config), config.parallel
    spec, split = layout.spec, layout.split
    engine_on(layout.device).warm_up()
    span = _load_span(config, layout, split, spec.num_layers, group=group, on_progress=on_progress)
    page_size = config.cache.page_size
    page_bytes, deferred_bytes = span.layers.kv_page_bytes(page_size), 0
    num_draft_ranks = parallel.draft_tensor_parallel_size
    if parallel.fallback and group.rank < num_draft_ranks:
        page_bytes += kv_page_bytes(
            num_layers=split,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=page_size,
            num_ranks=num_draft_ranks,
            bytes_per_value=span.layers.kv_dtype.itemsize,
        )
        deferred_bytes = fallback_bytes(
            config.model.path,
            spec,
            split=split,
            rank=group.rank,
            size=num_draft_ranks,
            dtype=layout.dtype,
        )
    room = kv_room(config, span.layers, page_bytes=page_bytes, deferred_bytes=deferred_bytes)
    return VerifyWeights(span=span, room=room, config=config)


def build_verify_stage(config: EngineConfig, group: TensorGroup) -> VerifyStage:
    """Builds one verify rank, with as many pages as it has room for alone."""
    weights = load_verify_weights(config, group)
    return weights.stage(num_pages=num_pages_of(config, {"the verify rank": weights.room}))


def build_draft_engine(
    config: EngineConfig,
    channel: VerifyChannel,
    *,
    epoch: int = 0,
    book: BeliefBook | None = None,
    cost: CostModel | None = None,
    clock: Callable[[], float] = monotonic,
    trace_round: TraceRound | None = None,
    recorder: RecorderSink | None = None,
    group: TensorGroup | None = None,
    commands: CommandSink | None = None,
    shard: DraftShard | None = None,
    grammars: GrammarCompiler | None = None,
    masks: Masks | None = None,
) -> EngineCore:
    """Builds the drafting actor's engine: draft stage, page tables and scheduler, over any channel.

    With a `group` of several ranks it is rank 0 of the draft stage; the others run
    `follow_commands` at the other end of `commands`. `shard`: one already built for this `group`;
    without it the draft rank alone decides the number of pages.

    `masks`: in place of those of `grammars`. Without a `cost` the draft step and the verify pass
    are measured now, through the channel.
    """
    layout = layout_of(config)
    if shard is None:
        shard = build_draft_shard(config, layout, group or SingleGroup())
    draft = _draft_stage(
        config, layout, shard if commands is None else LeadingShard(shard, commands)
    )
    if cost is None and draft.head is not None:
        cost = _cost_of(config, draft, channel, num_pages=shard.num_pages, epoch=epoch)
    pages = PageAllocator(
        num_pages=shard.num_pages,
        page_size=config.cache.page_size,
        prefix_caching=config.cache.prefix_caching,
    )
    scheduler = Scheduler(
        config=config.scheduler,
        pages=pages,
        max_model_len=min(layout.max_model_len, shard.num_pages * shard.page_size),
        max_draft_tokens=config.speculation.max_draft_tokens if draft.head is not None else 0,
        vocab_size=layout.spec.vocab_size,
        clock=clock,
        tree=config.speculation.tree,
    )
    return EngineCore(
        masks=masks
        or Masks(
            grammars=grammars or GrammarCompiler.of_folder(config.model.path),
            vocab_size=layout.spec.vocab_size,
            config=config.grammars,
        ),
        draft=draft,
        draft_traffic=_traffic_of(group),
        channel=channel,
        scheduler=scheduler,
        speculation=config.speculation,
        cost=cost,
        calibrator=Calibrator.load(layout.head_folder) if layout.head_folder else None,
        book=book,
        epoch=epoch,
        trace_round=trace_round,
        recorder=recorder,
        overlap_policy=OverlapPolicy(cost) if config.scheduler.overlap == "auto" else None,
    )


def _traffic_of(group: TensorGroup | None) -> Callable[[], Traffic]:
    """Returns the counter of this rank's traffic in a process group; other groups have none."""
    if isinstance(group, GroupHandle | ProcessGroup):
        process_group = group
        return lambda: process_group.counts().total
    return lambda: NO_TRAFFIC


def _cost_of(
    config: EngineConfig,
    draft: DraftStage,
    channel: VerifyChannel,
    *,
    num_pages: int,
    epoch: int,
) -> CostModel:
    """Returns the configured cost model, or one measured now."""
    if config.speculation.cost_file is not None:
        return CostModel.load(config.speculation.cost_file.expanduser())
    return measure_cost(
        draft,
        channel,
        page_size=config.cache.page_size,
        num_pages=num_pages,
        max_draft_tokens=config.speculation.max_draft_tokens,
        max_running=config.scheduler.max_running,
        epoch=epoch,
    )


def check_model(config: EngineConfig) -> None:
    """Checks what would end a start otherwise: files of the model and of the head, shapes and types
    of the model's tensors (headers only), the device, and the degrees of tensor parallelism.

    Raises CheckpointError or ConfigError.
    """
    layout = layout_of(config)
    for size in (
        config.parallel.draft_tensor_parallel_size,
        config.parallel.verify_tensor_parallel_size,
    ):
        Shard.of(layout.spec, rank=0, size=size)
    Tokenizer.load(config.model.path)
    SamplingDefaults.of_folder(config.model.path, mode=config.model.generation_config)

    def stop(_: LoadProgress) -> None:
        """Called first after the headers, before any data is read."""
        raise _Checked

    with suppress(_Checked):
        _load_span(config, layout, 0, layout.spec.num_layers, group=SingleGroup(), on_progress=stop)


class _Checked(Exception):
    """All headers were read."""


def compile_kernels(config: EngineConfig) -> None:
    """Builds the smallest stages of this model, so that what they compile is kept."""
    torch.set_num_threads(1)
    layout, group = layout_of(config), SingleGroup()
    if not engine_on(layout.device).compiles_kernels:
        return
    last = layout.spec.num_layers
    span = _load_span(config, layout, last - 1, last, group=group, on_progress=unwatched)
    room = kv_room(config, span.layers, page_bytes=span.layers.kv_page_bytes(1))
    VerifyWeights(span=span, room=room, config=config).stage(num_pages=1)
    load_draft_weights(config, replace(layout, split=1), group).shard(num_pages=1)


def without_overlap(config: EngineConfig) -> EngineConfig:
    """Returns the configuration of stages in one process: nothing overlaps, so that there is one
    microbatch with all requests."""
    scheduler = config.scheduler.model_copy(update={"overlap": False})
    return config.model_copy(update={"scheduler": scheduler})


def shared_room(draft: DraftWeights, verify: VerifyWeights) -> KvRoom:
    """Returns the room for KV pages of a process that has loaded a rank of each stage."""
    page_bytes = draft.room.page_bytes + verify.room.page_bytes
    held = held_bytes_of(verify.span.layers)
    return kv_room(draft.config, draft.span.layers, page_bytes=page_bytes, deferred_bytes=held)


def build_local_engine(
    config: EngineConfig,
    *,
    book: BeliefBook | None = None,
    cost: CostModel | None = None,
    trace_round: TraceRound | None = None,
    recorder: RecorderSink | None = None,
    grammars: GrammarCompiler | None = None,
    masks: Masks | None = None,
) -> EngineCore:
    """Builds both stages in this process, over a channel in memory."""
    for name in ("draft", "verify"):
        if getattr(config.parallel, f"{name}_tensor_parallel_size") != 1:
            raise ConfigError(
                f"one process holds one {name} rank: leave parallel.{name}_tensor_parallel_size "
                "at 1, or start the service"
            )
    torch.set_num_threads(config.parallel.num_threads)
    config = without_overlap(config)
    layout, group = layout_of(config), SingleGroup()
    draft = load_draft_weights(config, layout, group)
    remaining = load_verify_weights(config, group)
    num_pages = num_pages_of(config, {"this process": shared_room(draft, remaining)})
    return build_draft_engine(
        config,
        MemoryChannel(remaining.stage(num_pages=num_pages).verify),
        book=book,
        cost=cost,
        trace_round=trace_round,
        recorder=recorder,
        shard=draft.shard(num_pages=num_pages),
        grammars=grammars,
        masks=masks,
    )
