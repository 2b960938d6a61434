"""Stages without a model, for tests of the surrounding parts.

The token at position i of a request with seed s is (s + i) % 1000, a few per round, so that a test
knows every text in advance and detects one that was lost, repeated or resumed wrongly. Verify ranks
only wait. Nothing imports torch.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from eesd_dist.config import EngineConfig
from eesd_dist.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    PeerLost,
    QueueFull,
    RequestError,
)
from eesd_dist.routing.beliefs import DraftPlan, Priors
from eesd_dist.schedule.kv_pages import KvRoom
from eesd_dist.schedule.page_leases import KvLayout, PageTraffic
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.transport.authentication.refused import RefusedConnections
from eesd_dist.types import (
    Emission,
    FinishReason,
    Outcome,
    RecorderCounts,
    Request,
    RequestId,
    RoundStats,
    TokenId,
)
from eesd_dist.workers.load_watch import LoadWatch
from eesd_dist.workers.messages import (
    Address,
    ControlReport,
    Epoch,
    LoadedRank,
    PageLink,
    PagePart,
)
from eesd_dist.workers.roles import (
    DraftFollower,
    DraftLeader,
    PageSharing,
    PageTransfer,
    RankWorker,
)

TOKENS_PER_ROUND = 2
ROUND_S = 0.02

_in_this_process: "WeakSet[ToyDrafter | ToyRank]" = WeakSet()


def end_toys() -> None:
    """Ends the loops of all toys in this process: a test that has ended stops none of them."""
    for toy in list(_in_this_process):
        toy.end()


@contextmanager
def held(config: EngineConfig, *, at: int = 10, spinning: bool = False) -> Iterator[None]:
    """Limits requests of toys with this model folder to `at` tokens while the block runs.

    A held request makes progress, as a request with a long prompt does; with `spinning` none does.
    """
    word = _hold_of(config)
    draft_file = word.with_suffix(".begun")
    draft_file.write_text(str(-1 if spinning else at))
    draft_file.replace(word)  # atomic for all readers
    try:
        yield
    finally:
        word.unlink()


def _hold_of(config: EngineConfig) -> Path:
    return Path(config.model.path) / "hold"


def toy_token(request: Request, position: int) -> TokenId:
    return TokenId((request.sampling.seed + position) % 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyStep:
    emissions: tuple[Emission, ...] = ()
    rounds: tuple[RoundStats, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    awaits_masks: bool = False
    finished: tuple[RequestId, ...] = ()
    features: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyLoad:
    num_running: int
    num_waiting: int = 0
    free_pages: int
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_pages: int = 100


class ToyDrafter:
    """A complete engine: keeps its requests from one epoch to the next."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._live: dict[RequestId, Request] = {}
        self._num_rounds = 0
        self._is_over = False
        _in_this_process.add(self)

    def end(self) -> None:
        self._is_over = True

    def add(self, request: Request) -> None:
        with self._lock:
            if request.request_id in self._live:  # like the real scheduler
                raise RequestError(
                    f"request {request.request_id} is being served already: choose another id",
                    param="request_id",
                )
            if len(self._live) >= self._config.scheduler.max_waiting:
                raise QueueFull(num_waiting=len(self._live), limit=len(self._live))
            self._live[request.request_id] = request

    def drop(self, request_id: RequestId) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def step(self, *, wait_s: float) -> ToyStep:
        time.sleep(ROUND_S)
        if self._is_over:
            raise PeerLost(peer="the test", operation="rounds", reason="it is over")
        limit = self._limit()
        with self._lock:
            requests = [r for r in self._live.values() if limit is None or len(r.generated) < limit]
            self._meet(requests)
            emissions = tuple(self._advance(request) for request in requests)
        if not emissions:
            makes_progress = limit is not None and limit >= 0 and bool(self._live)
            return ToyStep(rounds=(_stats(0, ()),) if makes_progress else ())
        self._num_rounds += 1
        return ToyStep(
            emissions=emissions,
            rounds=(_stats(self._num_rounds, emissions),),
            outcomes=tuple(
                Outcome(request_id=e.request_id, num_drafted=1, num_accepted=e.num_accepted)
                for e in emissions
            ),
            finished=tuple(e.request_id for e in emissions if e.finish_reason is not None),
        )

    def _limit(self) -> int | None:
        try:
            return int(_hold_of(self._config).read_text())
        except FileNotFoundError:
            return None

    def _meet(self, requests: Sequence[Request]) -> None:
        """Called before the first round with these requests; toys do nothing."""

    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None:
        del plans

    def load(self) -> ToyLoad:
        with self._lock:
            return ToyLoad(num_running=len(self._live), free_pages=100 - len(self._live))

    def abort(self) -> None:
        return

    def _advance(self, request: Request) -> Emission:
        done = len(request.generated)
        count = min(TOKENS_PER_ROUND, request.sampling.max_tokens - done)
        start = len(request.prompt) + done
        tokens = tuple(toy_token(request, start + i) for i in range(count))
        is_last = done + count >= request.sampling.max_tokens
        if is_last:
            del self._live[request.request_id]
        else:
            self._live[request.request_id] = replace(request, generated=request.generated + tokens)
        return Emission(
            request_id=request.request_id,
            tokens=tokens,
            num_accepted=count - 1,
            num_drafted=1,
            finish_reason=FinishReason.LENGTH if is_last else None,
            submission=request.submission,
        )


def _stats(round_id: int, emissions: tuple[Emission, ...]) -> RoundStats:
    return RoundStats(
        round_id=round_id,
        microbatch=0,
        num_requests=len(emissions),
        num_rows=2 * len(emissions),
        num_prefill_rows=0 if emissions else 1,
        num_drafted=len(emissions),
        num_accepted=sum(e.num_accepted for e in emissions),
        num_emitted=sum(len(e.tokens) for e in emissions),
        plan_s=0.0,
        draft_s=ROUND_S,
        transfer_s=0.0,
        verify_s=0.0,
        commit_s=0.0,
        started_unix_s=time.time() - ROUND_S,
        elapsed_s=ROUND_S,
        request_ids=tuple(e.request_id for e in emissions),
        drafted_by_position=(len(emissions),),
        accepted_by_position=(sum(e.num_accepted for e in emissions),),
    )


def toy_rank(config: EngineConfig) -> LoadedRank:
    """Returns what a toy has loaded: weights are a file of the model's folder, if there is one."""
    file = Path(config.model.path) / "weights"
    weights = file.read_text() if file.exists() else ""
    return LoadedRank(weights=weights, products="", room=KvRoom(budget_bytes=100, page_bytes=1))


class ToyRank:
    def __init__(self) -> None:
        self._left = threading.Event()
        _in_this_process.add(self)

    def end(self) -> None:
        self._left.set()

    def number(self) -> int | None:
        return None

    def run(self) -> None:
        self._left.wait()

    def abort(self) -> None:
        self._left.set()


class ToyLeader:
    """Draft rank 0 without a model."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._drafter = ToyDrafter(config)
        self.loading = LoadWatch()
        self.refusals = RefusedConnections()

    @property
    def head_folder(self) -> str:
        return ""

    def load_vocabulary(self) -> None:
        """It has none."""

    def compile_grammar(self, grammar: str) -> None:
        raise RequestError("a toy has no grammars")

    def host_store(self) -> Address:
        return Address(host="nowhere", port=1)

    def prepare(self, *, cost: Mapping[str, object] | None = None) -> LoadedRank:
        del cost
        return toy_rank(self._config)

    def connect(self, epoch: Epoch) -> None:
        del epoch

    def disconnect(self) -> None:
        return

    def join(self, epoch: Epoch, *, new_engine: bool) -> ToyDrafter:
        if new_engine:
            self._drafter = ToyDrafter(self._config)
        return self._drafter

    def adopt(self, priors: Priors) -> None:
        del priors

    def load_head(self, folder: str, *, sha256: str | None = None) -> None:
        raise ConfigError(f"cannot take {folder}: toys draft without a head")

    def control(self) -> ControlReport:
        return ControlReport(head=None, calibration=None, cost=None, recorder=None)

    def recorder_counts(self) -> RecorderCounts | None:
        return None

    def flush(self) -> None:
        return

    @property
    def pages(self) -> PageTransfer:
        return NoPages()

    @property
    def sharing(self) -> PageSharing:
        raise EngineError("toys have no pages")


class NoPages:
    """The pages of a toy."""

    num_moved = 0

    def layout(self) -> KvLayout:
        raise EngineError("toys have no pages")

    def open(self, link: PageLink) -> None:
        raise EngineError("toys have no pages")

    def send(self, share: PagePart) -> PageTraffic:
        raise EngineError("toys have no pages")

    def receive(self, share: PagePart) -> PageTraffic:
        raise EngineError("toys have no pages")

    def close(self, link: str) -> None:
        raise EngineError("toys have no pages")


class ToyWorker:
    """A rank without a model, in either stage."""

    def __init__(self, config: EngineConfig, *, rank: int) -> None:
        self._config = config
        self._rank = rank
        self.loading = LoadWatch()

    @property
    def pages(self) -> PageTransfer:
        return NoPages()

    def prepare(self) -> LoadedRank:
        return toy_rank(self._config)

    def join(self, epoch: Epoch) -> ToyRank:
        if not os.path.isdir(self._config.model.path):
            raise CheckpointError(
                file=self._config.model.path, found="nothing", expected="a model folder"
            )
        return ToyRank()

    def disconnect(self) -> None:
        return

    def load_head(self, folder: str) -> str:
        raise ConfigError(f"cannot take {folder}: toys draft without a head")


class ToyStages:
    """Builds the toys of every role."""

    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return ToyLeader(config)

    def draft_follower(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> DraftFollower:
        return ToyWorker(config, rank=rank)

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return ToyWorker(config, rank=rank)
