"""The real stages inside the actors: engine and obeying ranks over torch.distributed groups.

The only file of the actors that imports torch; a pipeline replica hands on its name and never
loads it. Groups are called `rounds` (drafting actor and verify rank 0), `verify` and `draft` (the
ranks of a stage that has several); all belong to one generation and are dropped with it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray
import torch

from eesd_dist.config import EngineConfig
from eesd_dist.control.calibrator import CALIBRATION_FILE, Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import (
    Layout,
    build_draft_engine,
    build_draft_shard,
    build_verify_stage,
    head_shelf,
    layout_of,
    load_next_head,
)
from eesd_dist.engine.core import EngineCore, StepResult
from eesd_dist.engine.draft_ranks import HeadShelf, OwnShard, follow_commands
from eesd_dist.engine.page_store import PageStore, kv_layout
from eesd_dist.engine.requests import EngineLoad
from eesd_dist.engine.spool import SpoolSink
from eesd_dist.engine.verify import VerifyStage, follow_rounds, serve_rounds
from eesd_dist.errors import CheckpointError, ConfigError, EngineError
from eesd_dist.model.head_config import HeadConfig, head_digest
from eesd_dist.routing.beliefs import BeliefBook, DraftPlan, Priors
from eesd_dist.schedule.lending import KvLayout
from eesd_dist.telemetry.tracing import SpanIds, Tracing
from eesd_dist.transport.channel import DistRoundSource, DistVerifyChannel
from eesd_dist.transport.command_stream import DistCommandSink, DistCommandSource
from eesd_dist.transport.contracts import RoundHeader, RoundSource, VerifyChannel, VerifyReply
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.rendezvous import StoreHost, build_group, connect_store, leave_store
from eesd_dist.transport.seats import EmptySeat, LatestGroup, SingleGroup
from eesd_dist.transport.through_host import OntoDevice, ThroughHost
from eesd_dist.types import Request, RequestId, SpoolCounts
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.messages import (
    Address,
    ControlReport,
    DraftMember,
    Generation,
    HandsPages,
    HeadReport,
    LoadReport,
    RankMember,
    StageName,
)
from eesd_dist.workers.page_moves import PageMoves

_DRAFTER = "draft rank 0"


class Spool(SpoolSink, Protocol):
    """Where verified rows are kept, given from outside."""

    def counts(self) -> SpoolCounts: ...
    def flush(self) -> None:
        """Returns when everything taken so far is on disk, or dropped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServingHead:
    """An exit head as it was when it was loaded; its folder may have changed since."""

    report: HeadReport
    config: HeadConfig
    calibration: Mapping[str, object]


class EngineStages:
    """One per actor process; keeps what outlives a generation."""

    def __init__(
        self,
        config: EngineConfig,
        tracing: Tracing,
        *,
        open_spool: Callable[[], Spool] | None = None,
    ) -> None:
        """`open_spool` is called once, where rounds are drafted, and nowhere else."""
        torch.set_num_threads(config.parallel.num_threads)
        self._config = config
        """Names the exit head of the next engine; `load_head` changes it."""
        self._open_spool = open_spool
        self._spool: Spool | None = None
        """None where nothing is kept, or nothing has been drafted yet."""
        self._book = BeliefBook(discount=config.speculation.discount)
        """For requests that the router has not heard of yet, and for when it is silent."""
        self._head: _ServingHead | None = None
        """What the present engine drafts with; None when it drafts nothing."""
        self._changing = threading.Lock()
        """Held while an engine is built and while its head is changed."""
        self._tracing = tracing
        self._loading = LoadWatch()
        self._here = ray.util.get_node_ip_address()
        self._store: StoreHost | None = None
        """None until this process is asked to host one."""
        self._rounds: ProcessGroup | None = None
        """The newest generation's way to verify rank 0; None before the first."""
        self._draft_group: ProcessGroup | None = None
        """The same to the other ranks of the draft stage; None where there are none."""
        self._leading: tuple[LatestGroup, DistCommandSink] | None = None
        """What the present engine reaches them by; None where there are none."""
        self._connecting: Address | None = None
        """The store where groups are being built; None while they are not."""
        self._unjoined: list[ProcessGroup] = []
        """These two, until a member has them."""
        self._engine: EngineCore | None = None
        """None until the first generation has come about, and while a new one is built."""
        self._verify: tuple[VerifyStage, LatestGroup] | None = None
        """A verify rank's weights and pages; None until it has joined its first generation."""
        self._following: tuple[OwnShard, HeadShelf, LatestGroup] | None = None
        """A draft follower's; None until it has joined its first generation, or prepared for it."""
        self._prepared: tuple[OwnShard, LatestGroup] | None = None
        """The drafting actor's, loaded before its engine is built; None once one has it."""
        self._known_cost: CostModel | None = None
        """Of its first engine; None: to be measured."""
        self._preparing = threading.Lock()
        """Held while a draft rank's weights are loaded."""
        self._page_moves = PageMoves(
            here=self._here,
            store=self._page_store,
            engine=self._present_engine,
            layout=self._kv_layout,
        )

    def host_store(self) -> Address:
        self._store = StoreHost(address=self._here, timeout_s=self._config.parallel.timeout_s)
        return Address(host=self._here, port=self._store.port)

    def prepare_draft(self, *, rank: int, cost: Mapping[str, object] | None = None) -> None:
        seat = EmptySeat(rank=rank, size=self._config.parallel.draft_tensor_parallel_size)
        with self._preparing:
            if rank > 0 and self._following is None:
                self._following = self._load_follower(LatestGroup(seat))
            if rank == 0 and self._engine is None and self._prepared is None:
                latest = LatestGroup(seat if seat.size > 1 else SingleGroup())
                self._prepared = self._load_shard(latest), latest
                self._known_cost = None if cost is None else CostModel.from_json(cost)

    def connect_draft(self, generation: Generation) -> None:
        self.disconnect()
        with _all_or_none() as groups:
            groups.append(self._join(generation, "rounds", 0, (_DRAFTER, "verify rank 0")))
            if generation.num_draft_ranks > 1:
                groups.append(self._join_stage(generation, "draft", rank=0))
        self._unjoined = groups
        self._rounds, *followed = groups
        self._draft_group = followed[0] if followed else None

    def disconnect(self) -> None:
        store = self._connecting
        if store is not None:
            leave_store(store.host, store.port)
        for group in self._unjoined:
            group.abort("its generation was not joined")

    def join_draft(self, generation: Generation, *, anew: bool) -> DraftMember:
        group = self._rounds
        assert group is not None, "connect_draft comes first"
        channel: VerifyChannel = DistVerifyChannel(group)
        if generation.shares_gpu or generation.stands_in:
            channel = ThroughHost(channel)
        self._page_moves.enter(generation.number)
        with self._changing:
            if anew or self._engine is None:
                self._engine = None
                self._engine = self._build_engine(channel, generation)
                self._head = _serving_head(self._config, layout_of(self._config))
            else:
                self._lead_on()
                self._engine.attach(channel, generation=generation.number)
            groups = [group] if self._draft_group is None else [group, self._draft_group]
            self._unjoined = []
            return _Drafting(self._engine, groups)

    def _lead_on(self) -> None:
        """The same engine, with the draft ranks of a new generation."""
        if self._leading is not None and self._draft_group is not None:
            latest, commands = self._leading
            latest.join(self._draft_group)
            commands.join(self._draft_group)

    def adopt(self, priors: Priors) -> None:
        self._book.adopt(priors)

    def load_head(self, folder: str, *, sha256: str | None = None) -> None:
        model = self._config.model.model_copy(update={"head": Path(folder)})
        wished = self._config.model_copy(update={"model": model})
        with self._changing:
            if self._engine is None:
                raise EngineError(f"cannot take {folder} now: the engine is being built; try again")
            if self._head is None:
                raise ConfigError(
                    f"cannot take {folder}: this service drafts nothing; start it with an exit "
                    "head and a positive engine.speculation.max_draft_tokens"
                )
            layout = layout_of(wished)
            new = _serving_head(wished, layout)
            assert new is not None, "its folder was named"
            # Kind and draft vocabulary are what its guesses cost, which is measured only once.
            if sha256 is not None:
                _require_same(folder, "digest", found=new.report.sha256, expected=sha256)
            for what in ("exit_layer", "reads_embedding", "layer", "kind", "draft_vocab_size"):
                old_value, value = getattr(self._head.config, what), getattr(new.config, what)
                _require_same(folder, what, found=value, expected=old_value)
            group = SingleGroup() if self._leading is None else self._leading[0]
            head = load_next_head(wished, layout, Path(folder), group=group)
            self._engine.swap_head(head, Calibrator.load(Path(folder)))
            self._config, self._head = wished, new

    def control(self) -> ControlReport:
        with self._changing:
            engine, head = self._engine, self._head
        cost = engine.cost if engine is not None else None
        return ControlReport(
            head=None if head is None else head.report,
            calibration=None if head is None else head.calibration,
            cost=None if cost is None else cost.to_json(),
            spool=self.spool_counts(),
        )

    def pages(self) -> HandsPages:
        return self._page_moves

    def _present_engine(self) -> EngineCore:
        with self._changing:
            if self._engine is None:
                raise EngineError("no pages can be handed over now: the engine is being built")
            return self._engine

    def _page_store(self) -> PageStore:
        """This rank's pages, whichever stage it belongs to."""
        if self._verify is not None:
            return PageStore(self._verify[0].span)
        if self._following is not None:
            shard = self._following[0]
            return PageStore(shard.span, shard.head)
        draft = self._present_engine().draft_stage
        return PageStore(draft.span, draft.head)

    def _kv_layout(self) -> KvLayout:
        with self._changing:
            head = self._head
        return kv_layout(
            self._config,
            layout_of(self._config),
            weights=self._page_store().weights,
            head="" if head is None else head.report.sha256,
        )

    def spool_counts(self) -> SpoolCounts | None:
        return None if self._spool is None else self._spool.counts()

    def loading(self) -> LoadReport | None:
        return self._loading.report()

    def flush(self) -> None:
        if self._spool is not None:
            self._spool.flush()

    def join_verify(self, generation: Generation, *, rank: int) -> RankMember:
        self._page_moves.enter(generation.number)
        with _all_or_none() as groups:
            if rank == 0:
                groups.append(self._join(generation, "rounds", 1, (_DRAFTER, "verify rank 0")))
            tensor_group: SingleGroup | ProcessGroup = SingleGroup()
            if generation.num_verify_ranks > 1:
                tensor_group = self._join_stage(generation, "verify", rank=rank)
                groups.append(tensor_group)
            stage = self._verify_stage_in(tensor_group)
            # Built now: from here on the drafting actor may send.
            source: RoundSource | None = DistRoundSource(groups[0]) if rank == 0 else None
            if source is not None and generation.stands_in:
                source = OntoDevice(source, layout_of(self._config).device)
            return _Verifying(stage, groups, source=source, rank=rank, tracing=self._tracing)

    def _verify_stage_in(self, group: SingleGroup | ProcessGroup) -> VerifyStage:
        """Weights are loaded for the first generation, and stay for those to come."""
        if self._verify is None:
            latest = LatestGroup(group)
            self._verify = (
                build_verify_stage(
                    self._config, latest, on_progress=self._loading.of(f"verify rank {latest.rank}")
                ),
                latest,
            )
        stage, latest = self._verify
        latest.join(group)
        stage.span.paged.begin()
        return stage

    def load_head_part(self, folder: str) -> str:
        if self._following is None:
            raise EngineError(
                f"cannot take {folder} now: this draft rank is being built; try again"
            )
        return self._following[1].put_aside(Path(folder)).sha256

    def join_draft_follower(self, generation: Generation, *, rank: int) -> RankMember:
        self._page_moves.enter(generation.number)
        with _all_or_none() as groups:
            group = self._join_stage(generation, "draft", rank=rank)
            groups.append(group)
            with self._preparing:
                if self._following is None:
                    self._following = self._load_follower(LatestGroup(group))
            shard, heads, latest = self._following
            latest.join(group)
            shard.begin()
            return _Following(shard, heads, group)

    def _load_follower(self, latest: LatestGroup) -> tuple[OwnShard, HeadShelf, LatestGroup]:
        heads = head_shelf(self._config, layout_of(self._config), latest)
        return self._load_shard(latest), heads, latest

    def _load_shard(self, latest: LatestGroup) -> OwnShard:
        """A draft rank's part, whoever sits at the others."""
        return build_draft_shard(
            self._config,
            layout_of(self._config),
            latest,
            on_progress=self._loading.of(f"draft rank {latest.rank}"),
        )

    def _build_engine(self, channel: VerifyChannel, generation: Generation) -> EngineCore:
        # A stand-in keeps nothing: the drafting actor whose folder it is may be on its way.
        if self._spool is None and self._open_spool is not None and not generation.stands_in:
            self._spool = self._open_spool()
        # The requests of an engine that broke are gone; what they taught their classes is not.
        pools = self._book.priors()
        self._book = BeliefBook(discount=self._config.speculation.discount)
        self._book.adopt(pools)
        with self._preparing:
            if self._prepared is None:
                latest = LatestGroup(self._draft_group or SingleGroup())
                self._prepared = self._load_shard(latest), latest
            shard, latest = self._prepared
        self._leading = None
        if self._draft_group is not None:
            latest.join(self._draft_group)
            self._leading = latest, DistCommandSink(self._draft_group)
        group, commands = self._leading or (None, None)
        engine = build_draft_engine(
            self._config,
            channel,
            generation=generation.number,
            book=self._book,
            round_span=self._tracing.round_ids,
            spool=self._spool,
            group=group,
            commands=commands,
            shard=shard,
            cost=self._known_cost,
        )
        # Until here a lost peer may have ended it: the next attempt need not load again.
        self._prepared = self._known_cost = None
        return engine

    def _join_stage(self, generation: Generation, stage: StageName, *, rank: int) -> ProcessGroup:
        """The group of a stage that has several ranks."""
        names: tuple[str, ...]
        if stage == "draft":
            names = (_DRAFTER, *(f"draft rank {r}" for r in range(1, generation.num_draft_ranks)))
        else:
            names = tuple(f"verify rank {r}" for r in range(generation.num_verify_ranks))
        if generation.shares_gpu:
            raise ConfigError(
                f"{len(names)} {stage} ranks share a GPU, and each needs one of its own: set "
                "placement.draft.num_gpus and placement.verify.num_gpus to 1, or "
                f"{stage}_tensor_parallel_size to 1"
            )
        return self._join(generation, stage, rank, names)

    def _join(
        self, generation: Generation, name: str, rank: int, members: tuple[str, ...]
    ) -> ProcessGroup:
        device = self._device_of(generation, name)
        self._connecting = generation.store
        try:
            store = connect_store(
                generation.store.host, generation.store.port, timeout_s=generation.timeout_s
            )
            return build_group(
                store,
                generation=generation.number,
                name=name,
                rank=rank,
                size=len(members),
                timeout_s=generation.timeout_s,
                device=device,
                address=self._here,
                members=members,
                ordered_sums=self._config.model.numerics == "invariant",
            )
        finally:
            self._connecting = None

    def _device_of(self, generation: Generation, group: str) -> torch.device:
        """Where tensors lie that this group sends. Raises what a bad checkpoint raises."""
        through_host = generation.shares_gpu or (generation.stands_in and group == "rounds")
        return torch.device("cpu") if through_host else layout_of(self._config).device


class _Drafting:
    """The engine over one generation's groups."""

    def __init__(self, engine: EngineCore, groups: list[ProcessGroup]) -> None:
        self._engine = engine
        self._groups = groups

    def add(self, request: Request) -> None:
        self._engine.add(request)

    def drop(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)

    def step(self, *, wait_s: float) -> StepResult:
        with _naming_who_is_lost(self._groups):
            return self._engine.step(wait_s=wait_s)

    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None:
        self._engine.apply_plans(plans)

    def load(self) -> EngineLoad:
        return self._engine.load()

    def abort(self) -> None:
        for group in self._groups:
            group.abort("the generation was ended")


class _Following:
    """One draft follower's loop in one generation."""

    def __init__(self, shard: OwnShard, heads: HeadShelf, group: ProcessGroup) -> None:
        self._shard = shard
        self._heads = heads
        self._group = group
        # Built now: from here on the drafting actor may announce.
        self._source = DistCommandSource(group)

    def run(self) -> None:
        try:
            with self._group.names_who_is_lost():
                follow_commands(self._shard, self._source, heads=self._heads)
        finally:
            self.abort()  # whoever waits for this rank need not wait for a deadline

    def abort(self) -> None:
        self._group.abort("the generation was ended")


class _Verifying:
    """One verify rank's loop in one generation."""

    def __init__(
        self,
        stage: VerifyStage,
        groups: list[ProcessGroup],
        *,
        source: RoundSource | None,
        rank: int,
        tracing: Tracing,
    ) -> None:
        """`source` is rank 0's."""
        self._stage = stage
        self._groups = groups
        self._source = source
        self._rank = rank
        self._tracing = tracing

    def run(self) -> None:
        try:
            with _naming_who_is_lost(self._groups):
                if self._source is not None:
                    serve_rounds(self._stage, self._source, observe=self._record)
                else:
                    follow_rounds(self._stage, observe=self._record)
        finally:
            self.abort()  # whoever waits for this rank need not wait for a deadline

    def abort(self) -> None:
        for group in self._groups:
            group.abort("the generation was ended")

    def _record(self, header: RoundHeader, reply: VerifyReply) -> None:
        self._tracing.record_rank(
            SpanIds(trace_id=header.trace_id, span_id=header.span_id),
            rank=self._rank,
            num_rows=header.num_rows,
            started_unix_s=time.time() - reply.verify_s,
            seconds=reply.verify_s,
        )


@contextmanager
def _all_or_none() -> Iterator[list[ProcessGroup]]:
    """For the groups of one generation: where one of them or its member does not come about, the
    others are of no use, and hold memory of a GPU."""
    groups: list[ProcessGroup] = []
    try:
        yield groups
    except BaseException:
        for group in groups:
            group.abort("its generation did not come about")
        raise


@contextmanager
def _naming_who_is_lost(groups: Sequence[ProcessGroup]) -> Iterator[None]:
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(group.names_who_is_lost())
        yield


def _serving_head(config: EngineConfig, layout: Layout) -> _ServingHead | None:
    """None where nothing is ever drafted. Raises CheckpointError for a head that does not fit."""
    folder = layout.head_folder
    if folder is None or config.speculation.max_draft_tokens == 0:
        return None
    head = HeadConfig.read(folder, target=layout.spec, target_path=config.model.path)
    file = folder / CALIBRATION_FILE
    version = json.loads(file.read_text()).get("version") if file.exists() else None
    return _ServingHead(
        report=HeadReport(
            folder=str(folder),
            sha256=head_digest(folder),
            exit_layer=head.exit_layer,
            kind=head.kind,
        ),
        config=head,
        calibration={"num_judged": Calibrator.load(folder).num_judged, "version": version},
    )


def _require_same(folder: str, what: str, *, found: object, expected: object) -> None:
    if found != expected:
        raise CheckpointError(
            file=folder,
            found=f"{what} {found}",
            expected=f"{expected}, as the head has that is serving",
            advice="restart the service with --head to change it",
        )
