"""Draft rank 0: builds the engine and connects it to the groups of each epoch. Verify rank 0 may be
in the same process.

Owns the state that outlives an epoch: weights, pages, live requests, the exit head, the recorder
and the beliefs of requests that the router does not know yet.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from eesd_dist.backends.cpu.ahead import wait_for_layers
from eesd_dist.config import EngineConfig
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import (
    DraftWeights,
    build_draft_engine,
    load_draft_weights,
    load_next_head,
    shared_room,
    without_overlap,
)
from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.masks import Masks
from eesd_dist.engine.page_store import PageStore, kv_layout
from eesd_dist.engine.recording.recorder import RecorderSink
from eesd_dist.engine.requests import EngineLoad
from eesd_dist.engine.shared_channel import SharedVerifyChannel
from eesd_dist.errors import CheckpointError, ConfigError, EngineError
from eesd_dist.routing.beliefs import BeliefBook, DraftPlan, Priors
from eesd_dist.schedule.page_leases import KvLayout
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.text.grammars import GrammarCompiler
from eesd_dist.transport.channel import DistVerifyChannel
from eesd_dist.transport.command_stream import DistCommandSink
from eesd_dist.transport.contracts import VerifyChannel
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import GroupHandle, SingleGroup, UnconnectedGroup
from eesd_dist.transport.memory import ThroughHost
from eesd_dist.types import RecorderCounts, Request, RequestId
from eesd_dist.workers.epochs.epoch_groups import (
    EpochGroups,
    abort_all,
    all_or_none,
    naming_the_lost,
)
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.messages import Address, ControlReport, Epoch, LoadedRank
from eesd_dist.workers.page_moves import PageMoves, PageSharing
from eesd_dist.workers.process import freeze_heap
from eesd_dist.workers.serving_head import ServingHead, require_compatible, serving_head
from eesd_dist.workers.verify_rank import VerifyRank, rank_observer


class Recorder(RecorderSink, Protocol):
    """Stores verified rows. Passed in by the service."""

    def counts(self) -> RecorderCounts: ...
    def flush(self) -> None:
        """Waits until everything taken so far is on disk or dropped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Loaded weights that no engine uses yet."""

    weights: DraftWeights
    handle: GroupHandle
    cost: CostModel | None
    """The cost model that the engine would measure, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connected:
    """The groups of an epoch."""

    verify: ProcessGroup | None
    """The group to verify rank 0, or, where this process has that rank, to the others; None where
    there are none."""
    draft: ProcessGroup | None
    """The draft stage's group; None where it has one rank."""

    @property
    def all(self) -> list[ProcessGroup]:
        return [group for group in (self.verify, self.draft) if group is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followers:
    """An engine's connection to the other draft ranks."""

    handle: GroupHandle
    commands: DistCommandSink

    def join(self, group: ProcessGroup) -> None:
        self.handle.join(group)
        self.commands.join(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """An engine, with its followers where the draft stage has several ranks."""

    engine: EngineCore
    followers: _Followers | None


class EngineLeader:
    """Implements `roles.DraftLeader`."""

    def __init__(
        self,
        config: EngineConfig,
        tracing: Tracing,
        *,
        open_recorder: Callable[[], Recorder] | None = None,
        masks: Masks | None = None,
        address: str | None = None,
        holds_verify_rank: bool = False,
    ) -> None:
        """`open_recorder` is called once, by the first engine that may record. `masks`: in place of
        those of the model's grammars, for one engine; `address`: in place of the node's.
        `holds_verify_rank`: verify rank 0 is in this process too."""
        torch.set_num_threads(config.parallel.num_threads)
        self._config = without_overlap(config) if holds_verify_rank else config
        """Includes the exit head of the next engine; `load_head` replaces it."""
        self._spans = tracing.rounds
        self._open_recorder = open_recorder
        self._recorder: Recorder | None = None
        """None where nothing is recorded, or no engine was built yet."""
        self._book = BeliefBook(discount=config.speculation.discount)
        """Beliefs about requests that the router does not know yet, and while it is silent."""
        self._head: ServingHead | None = None
        """The newest engine's exit head; None when it drafts nothing."""
        self._running: _Running | None = None
        """None while an engine is being built, and after a build that failed."""
        self._changing = threading.Lock()
        """Held while an engine is built and while its head is changed."""
        self._prepared: _Prepared | None = None
        """None before the first `prepare`, and once an engine uses the weights."""
        self._preparing = threading.Lock()
        """Held while weights are loaded."""
        self._loaded: LoadedRank | None = None
        """Report of the first load; None before it."""
        self._masks = masks
        self._grammars = GrammarCompiler.of_folder(config.model.path)
        self._groups = EpochGroups(config, address=address)
        self._connected: _Connected | None = None
        """Groups of the newest epoch until `join` uses them."""
        self.loading = LoadWatch()
        self._verify: VerifyRank | None = None
        """Verify rank 0; None where it has a process of its own."""
        if holds_verify_rank:
            self._verify = VerifyRank(config, rank=0, groups=self._groups, loading=self.loading)
        self.pages = PageMoves(
            address=self._groups.address,
            store=self._page_store,
            layout=self._kv_layout,
            refusals=self._groups.refusals,
        )
        self.refusals = self._groups.refusals
        self.sharing = PageSharing(
            address=self._groups.address,
            kv_sharing=lambda: self._engine().kv_sharing,
            refusals=self.refusals,
        )

    @property
    def head_folder(self) -> str:
        """Folder of the exit head that later engines get; empty for none."""
        head = self._config.model.head
        return "" if head is None else str(head)

    def compile_grammar(self, grammar: str) -> None:
        self._grammars.matcher(grammar)

    def load_vocabulary(self) -> None:
        self._grammars.load()
        freeze_heap()

    def host_store(self) -> Address:
        return self._groups.host_store()

    def prepare(self, *, cost: Mapping[str, object] | None = None) -> LoadedRank:
        cost_model = None if cost is None else CostModel.from_json(cost)
        with self._preparing:
            if self._loaded is None or (self._running is None and self._prepared is None):
                size = self._config.parallel.draft_tensor_parallel_size
                handle = UnconnectedGroup(rank=0, size=size) if size > 1 else SingleGroup()
                self._prepared = self._load(GroupHandle(handle), cost=cost_model)
            assert self._loaded is not None, "it was set by the first load"
            return self._loaded

    def connect(self, epoch: Epoch) -> None:
        self.disconnect()
        verify, draft = None, None
        with all_or_none() as groups:
            if self._verify is None:
                groups.append(verify := self._groups.rounds(epoch, rank=0))
            elif (verify := self._verify.connect(epoch)) is not None:
                groups.append(verify)
            if epoch.num_draft_ranks > 1:
                groups.append(draft := self._groups.stage(epoch, "draft", rank=0))
        self._connected = _Connected(verify=verify, draft=draft)

    def disconnect(self) -> None:
        self._groups.leave()
        if self._connected is not None:
            abort_all(self._connected.all, "its epoch was not joined")

    def join(self, epoch: Epoch, *, new_engine: bool) -> "LeaderEpoch":
        groups = self._connected
        assert groups is not None, "connect comes first"
        self.pages.enter(epoch.number)
        self.sharing.forget()
        channel = self._channel(epoch, groups.verify)
        with self._changing:
            if new_engine or self._running is None:
                if self._running is not None:
                    self._running = None
                    freeze_heap()  # frees the former engine, which refers to itself
                self._running = self._build(channel, epoch, groups.draft)
                if not epoch.is_degraded:  # a fallback serves for seconds, and should soon begin
                    freeze_heap()
                self._head = serving_head(self._config, layout_of(self._config))
            else:
                if self._running.followers is not None and groups.draft is not None:
                    self._running.followers.join(groups.draft)
                self._running.engine.attach(channel, epoch=epoch.number)
            self._connected = None
            return LeaderEpoch(self._running.engine, groups.all)

    def _channel(self, epoch: Epoch, group: ProcessGroup | None) -> VerifyChannel:
        if self._verify is not None:
            stage = self._verify.begin(epoch)
            return SharedVerifyChannel(stage, group, observe=rank_observer(self._spans, rank=0))
        assert group is not None, "verify rank 0 is in another process"
        channel = DistVerifyChannel(group)
        return ThroughHost(channel) if epoch.is_degraded else channel

    def adopt(self, priors: Priors) -> None:
        self._book.adopt(priors)

    def load_head(self, folder: str, *, sha256: str | None = None) -> None:
        model = self._config.model.model_copy(update={"head": Path(folder)})
        requested = self._config.model_copy(update={"model": model})
        with self._changing:
            running = self._running
            if running is None:
                raise EngineError(f"cannot take {folder} now: the engine is being built; try again")
            if self._head is None:
                raise ConfigError(
                    f"cannot take {folder}: this service drafts nothing; start it with an exit "
                    "head and a positive engine.speculation.max_draft_tokens"
                )
            layout = layout_of(requested)
            new = serving_head(requested, layout)
            assert new is not None, "its folder was named"
            require_compatible(folder, new, serving=self._head, sha256=sha256)
            group = SingleGroup() if running.followers is None else running.followers.handle
            head = load_next_head(requested, layout, Path(folder), group=group)
            running.engine.swap_head(head, Calibrator.load(Path(folder)))
            self._config, self._head = requested, new

    def control(self) -> ControlReport:
        with self._changing:
            running, head = self._running, self._head
        cost = running.engine.cost if running is not None else None
        return ControlReport(
            head=None if head is None else head.report,
            calibration=None if head is None else head.calibration,
            cost=None if cost is None else cost.to_json(),
            recorder=self.recorder_counts(),
        )

    def recorder_counts(self) -> RecorderCounts | None:
        return None if self._recorder is None else self._recorder.counts()

    def flush(self) -> None:
        if self._recorder is not None:
            self._recorder.flush()

    def _engine(self) -> EngineCore:
        with self._changing:
            if self._running is None:
                raise EngineError("no pages can be moved now: the engine is being built; try again")
            return self._running.engine

    def _page_store(self) -> PageStore:
        draft = self._engine().draft_stage
        verify = None if self._verify is None else self._verify.present().span
        return PageStore(draft.span, draft.head, verify)

    def _kv_layout(self) -> KvLayout:
        with self._changing:
            head = self._head
        return kv_layout(
            self._config,
            layout_of(self._config),
            weights=self._page_store().weights,
            head="" if head is None else head.report.sha256,
        )

    def _load(self, handle: GroupHandle, *, cost: CostModel | None = None) -> _Prepared:
        """Loads the weights. Raises CheckpointError when they have changed since the first load."""
        wait_for_layers()
        weights = load_draft_weights(
            self._config,
            layout_of(self._config),
            handle,
            on_progress=self.loading.of("draft rank 0"),
        )
        room, digests = weights.room, {weights.span.digest}
        if self._verify is not None:
            verify = self._verify.load()
            room = shared_room(weights, verify)
            digests.add(verify.span.digest)
        loaded = LoadedRank(weights=weights.span.digest, products=weights.span.products, room=room)
        if self._loaded is None:
            self._loaded = loaded
        for digest in digests - {self._loaded.weights}:
            raise CheckpointError(
                file=self._config.model.path,
                found=f"weights {digest[:12]}",
                expected=f"{self._loaded.weights[:12]}, as when this process first read them",
                advice="restart the service to change them",
            )
        return _Prepared(weights=weights, handle=handle, cost=cost)

    def _build(self, channel: VerifyChannel, epoch: Epoch, draft: ProcessGroup | None) -> _Running:
        """Builds an engine. `draft` is the draft stage's group where it has several ranks."""
        # A fallback records nothing: the drafting actor that owns the folder may be starting.
        if self._recorder is None and self._open_recorder is not None and not epoch.is_degraded:
            self._recorder = self._open_recorder()
        # Requests of a failed engine are dropped; the pools they contributed to are kept.
        pools = self._book.priors()
        self._book = BeliefBook(discount=self._config.speculation.discount)
        self._book.adopt(pools)
        with self._preparing:
            if self._prepared is None:
                self._prepared = self._load(GroupHandle(draft or SingleGroup()))
            prepared = self._prepared
        followers = None
        if draft is not None:
            prepared.handle.join(draft)
            followers = _Followers(handle=prepared.handle, commands=DistCommandSink(draft))
        engine = build_draft_engine(
            self._config,
            channel,
            epoch=epoch.number,
            book=self._book,
            trace_round=None if self._spans is None else self._spans.trace_round,
            recorder=self._recorder,
            group=None if followers is None else followers.handle,
            commands=None if followers is None else followers.commands,
            shard=prepared.weights.shard(num_pages=epoch.num_pages, compiles_in_background=True),
            cost=prepared.cost,
            grammars=self._grammars,
            masks=self._masks,
        )
        # Cleared last: when a lost peer fails the build, the next attempt need not load again.
        self._prepared = None
        return _Running(engine=engine, followers=followers)


class LeaderEpoch:
    """The engine over the groups of one epoch."""

    def __init__(self, engine: EngineCore, groups: list[ProcessGroup]) -> None:
        self.engine = engine
        self._groups = groups

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def drop(self, request_id: RequestId) -> None:
        self.engine.abort(request_id)

    def step(self, *, wait_s: float) -> StepResult:
        with naming_the_lost(self._groups):
            return self.engine.step(wait_s=wait_s)

    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None:
        self.engine.apply_plans(plans)

    def load(self) -> EngineLoad:
        return self.engine.load()

    def abort(self) -> None:
        abort_all(self._groups, "the epoch was ended")
