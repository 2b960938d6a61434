"""Toys that a poison request crashes, by death or exception, in a drafting actor or verify rank.

A poison prompt begins with POISON and names the kind of crash. Ranks read it from a file, since
toys exchange no messages. A pipeline of toys is ready quickly and recovers like a real one.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from eesd_dist.config import EngineConfig
from eesd_dist.errors import PeerLost
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, TokenId
from eesd_dist.workers.messages import Epoch
from eesd_dist.workers.roles import DraftLeader, RankWorker
from tests.support.toy_stages import (
    ToyDrafter,
    ToyLeader,
    ToyRank,
    ToyStages,
    ToyStep,
    ToyWorker,
)

POISON = TokenId(666)
WAYS = {
    "death of the drafting actor": TokenId(1),
    "bug in the drafting actor": TokenId(2),
    "death of a verify rank": TokenId(3),
    "bug in a verify rank": TokenId(4),
}
_NAMES = {token: fault for fault, token in WAYS.items()}


class _Met(Exception):
    """Raised when a poison request is in the round."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault


def _break(fault: str) -> None:
    if fault.startswith("death"):
        os.abort()
    raise ValueError("this token is in no vocabulary")


def _word_for_rank(config: EngineConfig) -> Path:
    return Path(config.model.path) / "for-rank-0"


class PoisonedDrafter(ToyDrafter):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._word = _word_for_rank(config)
        self._aborted = threading.Event()

    def begin(self) -> None:
        self._aborted.clear()

    def abort(self) -> None:
        self._aborted.set()

    def step(self, *, wait_s: float) -> ToyStep:
        try:
            return super().step(wait_s=wait_s)
        except _Met as met:
            self._take(met.fault)
            raise

    def _meet(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.prompt[0] == POISON:
                raise _Met(_NAMES[request.prompt[1]])

    def _take(self, fault: str) -> None:
        if fault.endswith("drafting actor"):
            _break(fault)
        if not self._aborted.is_set():
            self._word.write_text(fault)
        self._aborted.wait()
        raise PeerLost(peer="verify rank 0", operation="round", reason="Connection closed by peer")


class PoisonedRank(ToyRank):
    def __init__(self, word: Path) -> None:
        super().__init__()
        self._word = word

    def run(self) -> None:
        while not self._left.wait(0.02):
            if self._word.exists():
                fault = self._word.read_text()
                self._word.unlink()
                _break(fault)


class PoisonedLeader(ToyLeader):
    def join(self, epoch: Epoch, *, new_engine: bool) -> PoisonedDrafter:
        if new_engine or not isinstance(self._drafter, PoisonedDrafter):
            self._drafter = PoisonedDrafter(self._config)
        self._drafter.begin()
        return self._drafter


class PoisonedWorker(ToyWorker):
    def join(self, epoch: Epoch) -> ToyRank:
        return PoisonedRank(_word_for_rank(self._config)) if self._rank == 0 else ToyRank()


class PoisonedStages(ToyStages):
    def draft_leader(
        self, config: EngineConfig, tracing: Tracing, *, holds_verify_rank: bool = False
    ) -> DraftLeader:
        return PoisonedLeader(config)

    def verify_worker(self, config: EngineConfig, tracing: Tracing, *, rank: int) -> RankWorker:
        return PoisonedWorker(config, rank=rank)
