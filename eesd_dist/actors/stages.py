"""The real stages inside the actors: engine and verify ranks over torch.distributed groups.

The only file of the actors that imports torch; a pipeline replica hands on its name and never
loads it. Groups are called `rounds` (drafting actor and verify rank 0) and `verify` (the tensor-
parallel group); both belong to one generation and are dropped with it.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray
import torch

from eesd_dist.actors.contracts import (
    Address,
    ControlReport,
    DraftMember,
    Generation,
    HeadReport,
    VerifyMember,
)
from eesd_dist.config import EngineConfig
from eesd_dist.control.calibrator import CALIBRATION_FILE, Calibrator
from eesd_dist.engine.build import (
    Layout,
    build_draft_engine,
    build_verify_stage,
    layout_of,
    load_exit_head,
)
from eesd_dist.engine.core import EngineCore, EngineLoad, StepResult
from eesd_dist.engine.spool import SpoolSink
from eesd_dist.engine.verify import VerifyStage, follow_rounds, serve_rounds
from eesd_dist.errors import CheckpointError, ConfigError, EngineError, PeerLost
from eesd_dist.model.head_config import HeadConfig, head_digest
from eesd_dist.routing.beliefs import BeliefBook, DraftPlan, Priors
from eesd_dist.telemetry.tracing import SpanIds, Tracing
from eesd_dist.transport.channel import DistRoundSource, DistVerifyChannel
from eesd_dist.transport.contracts import RoundHeader, VerifyChannel, VerifyReply
from eesd_dist.transport.group import ProcessGroup, SingleGroup
from eesd_dist.transport.rendezvous import StoreHost, build_group, connect_store
from eesd_dist.transport.through_host import ThroughHost
from eesd_dist.types import Request, RequestId, SpoolCounts

_DRAFTER = "drafting actor"


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
        self._here = ray.util.get_node_ip_address()
        self._store: StoreHost | None = None
        """None until this process is asked to host one."""
        self._rounds: ProcessGroup | None = None
        """The newest generation's way to verify rank 0; None before the first."""
        self._newest = 0
        """The latest generation that was connected to."""
        self._engine: EngineCore | None = None
        """None until the first generation has come about, and while a new one is built."""

    def host_store(self) -> Address:
        self._store = StoreHost(address=self._here, timeout_s=self._config.parallel.timeout_s)
        return Address(host=self._here, port=self._store.port)

    def connect_draft(self, generation: Generation) -> None:
        self._newest = max(self._newest, generation.number)
        group = self._join(generation, "rounds", 0, (_DRAFTER, "verify rank 0"))
        if generation.number < self._newest:  # it has waited for a peer for too long
            group.abort("a newer generation began")
            raise PeerLost(peer=_DRAFTER, operation="connect", reason="a newer generation began")
        self._rounds = group

    def join_draft(self, generation: Generation, *, anew: bool) -> DraftMember:
        group = self._rounds
        assert group is not None, "connect_draft comes first"
        channel: VerifyChannel = DistVerifyChannel(group)
        if generation.shares_gpu:
            channel = ThroughHost(channel)
        with self._changing:
            if anew or self._engine is None:
                self._engine = None
                self._engine = self._build_engine(channel, generation)
                self._head = _serving_head(self._config, layout_of(self._config))
            else:
                self._engine.attach(channel, generation=generation.number)
            return _Drafting(self._engine, group)

    def adopt(self, priors: Priors) -> None:
        self._book.adopt(priors)

    def load_head(self, folder: str) -> None:
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
            for what in ("exit_layer", "reads_embedding", "layer", "kind", "draft_vocab_size"):
                old_value, value = getattr(self._head.config, what), getattr(new.config, what)
                _require_same(folder, what, found=value, expected=old_value)
            # One page: it goes on with the pages of the head it takes the place of.
            cache = wished.cache.model_copy(update={"num_pages": 1})
            small = wished.model_copy(update={"cache": cache})
            head = load_exit_head(small, layout, Path(folder))
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

    def spool_counts(self) -> SpoolCounts | None:
        return None if self._spool is None else self._spool.counts()

    def flush(self) -> None:
        if self._spool is not None:
            self._spool.flush()

    def join_verify(self, generation: Generation, *, rank: int) -> VerifyMember:
        groups: list[ProcessGroup] = []
        if rank == 0:
            groups.append(self._join(generation, "rounds", 1, (_DRAFTER, "verify rank 0")))
        size = generation.num_verify_ranks
        if generation.shares_gpu and size > 1:
            raise ConfigError(
                f"{size} verify ranks share a GPU, and each needs one of its own: set "
                "placement.verify.num_gpus to 1, or verify_tensor_parallel_size to 1"
            )
        if size == 1:
            stage = build_verify_stage(self._config, SingleGroup())
        else:
            names = tuple(f"verify rank {r}" for r in range(size))
            tensor_group = self._join(generation, "verify", rank, names)
            groups.append(tensor_group)
            stage = build_verify_stage(self._config, tensor_group)
        return _Verifying(stage, groups, rank=rank, tracing=self._tracing)

    def _build_engine(self, channel: VerifyChannel, generation: Generation) -> EngineCore:
        if self._spool is None and self._open_spool is not None:
            self._spool = self._open_spool()
        # The requests of an engine that broke are gone; what they taught their classes is not.
        pools = self._book.priors()
        self._book = BeliefBook(discount=self._config.speculation.discount)
        self._book.adopt(pools)
        return build_draft_engine(
            self._config,
            channel,
            generation=generation.number,
            book=self._book,
            round_span=self._tracing.round_ids,
            spool=self._spool,
        )

    def _join(
        self, generation: Generation, name: str, rank: int, members: tuple[str, ...]
    ) -> ProcessGroup:
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
            device=self._device_of(generation),
            address=self._here,
            members=members,
        )

    def _device_of(self, generation: Generation) -> torch.device:
        """Where tensors lie that this generation sends. Raises what a bad checkpoint raises."""
        return torch.device("cpu") if generation.shares_gpu else layout_of(self._config).device


class _Drafting:
    """The engine over one generation's channel."""

    def __init__(self, engine: EngineCore, group: ProcessGroup) -> None:
        self._engine = engine
        self._group = group

    def add(self, request: Request) -> None:
        self._engine.add(request)

    def drop(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)

    def step(self, *, wait_s: float) -> StepResult:
        return self._engine.step(wait_s=wait_s)

    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None:
        self._engine.apply_plans(plans)

    def load(self) -> EngineLoad:
        return self._engine.load()

    def abort(self) -> None:
        self._group.abort("the generation was ended")


class _Verifying:
    """One verify rank's loop in one generation."""

    def __init__(
        self, stage: VerifyStage, groups: list[ProcessGroup], *, rank: int, tracing: Tracing
    ) -> None:
        self._stage = stage
        self._groups = groups
        self._rank = rank
        self._tracing = tracing
        # Built now: from here on the drafting actor may send.
        self._source = DistRoundSource(groups[0]) if rank == 0 else None

    def run(self) -> None:
        try:
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
