"""The ranks of one pipeline as processes without Ray actors; cheap to import in a peer."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from eesd_dist.config import EngineConfig
from eesd_dist.errors import PeerLost
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.transport.authentication.key_store import StoreHost
from eesd_dist.workers.draft_leader import EngineLeader
from eesd_dist.workers.messages import Epoch
from eesd_dist.workers.roles import RankWorker
from eesd_dist.workers.stage_factory import EngineStages
from tests.dist.transport.peers import peer_process

TIMEOUT_S = 60.0


def leader_of(config: EngineConfig) -> EngineLeader:
    return EngineLeader(config, Tracing())


def obey(config: EngineConfig, first: Epoch, stage: str, rank: int) -> None:
    """Runs a rank: one epoch after the other, with the same weights."""
    stages = EngineStages()
    if stage == "draft":
        worker: RankWorker = stages.draft_follower(config, Tracing(), rank=rank)
    else:
        worker = stages.verify_worker(config, Tracing(), rank=rank)
    number = first.number
    while True:
        epoch_run = worker.join(_numbered(first, number))
        try:
            epoch_run.run()
        except PeerLost:
            number += 1


@contextmanager
def ranks(config: EngineConfig) -> Iterator[Epoch]:
    """Starts all ranks except the drafting actor; yields their first epoch."""
    parallel = config.parallel
    host = StoreHost()
    first = Epoch(
        number=1,
        store=host.at,
        num_verify_ranks=parallel.verify_tensor_parallel_size,
        num_draft_ranks=parallel.draft_tensor_parallel_size,
        timeout_s=TIMEOUT_S,
        num_pages=config.cache.num_pages or 96,
    )
    slots = [("draft", rank) for rank in range(1, first.num_draft_ranks)]
    slots += [("verify", rank) for rank in range(first.num_verify_ranks)]
    with ExitStack() as processes:
        for stage, rank in slots:
            processes.enter_context(peer_process(obey, config, first, stage, rank))
        yield first


def _numbered(first: Epoch, number: int) -> Epoch:
    return Epoch(
        number=number,
        store=first.store,
        num_verify_ranks=first.num_verify_ranks,
        num_draft_ranks=first.num_draft_ranks,
        timeout_s=first.timeout_s,
        num_pages=first.num_pages,
    )


class Drafter:
    """The leader of the drafting actor, moved from one epoch to the next."""

    def __init__(self, config: EngineConfig, before: Epoch) -> None:
        self.leader = leader_of(config)
        self.epoch = before
        self._first = True

    def join(self, number: int) -> "Drafter":
        self.epoch = _numbered(self.epoch, number)
        self.leader.connect(self.epoch)
        self.part = self.leader.join(self.epoch, new_engine=self._first)
        self._first = False
        return self
