"""The ranks of one pipeline as processes without Ray's actors: light to import for a peer."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from eesd_dist.config import EngineConfig
from eesd_dist.errors import PeerLost
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.transport.rendezvous import StoreHost
from eesd_dist.workers.draft_leader import EngineLeader
from eesd_dist.workers.messages import Address, Generation
from eesd_dist.workers.roles import RankWorker
from eesd_dist.workers.stage_factory import EngineStages
from tests.dist.transport.peers import peer_process

TIMEOUT_S = 60.0


def leader_of(config: EngineConfig) -> EngineLeader:
    return EngineLeader(config, Tracing())


def obey(config: EngineConfig, first: Generation, stage: str, rank: int) -> None:
    """A rank's life: one generation after the other, with the same weights."""
    stages = EngineStages()
    if stage == "draft":
        worker: RankWorker = stages.draft_follower(config, Tracing(), rank=rank)
    else:
        worker = stages.verify_worker(config, Tracing(), rank=rank)
    number = first.number
    while True:
        member = worker.join(_numbered(first, number))
        try:
            member.run()
        except PeerLost:
            number += 1


@contextmanager
def ranks(config: EngineConfig) -> Iterator[Generation]:
    """Every rank but the drafting actor; yields the first generation they join."""
    parallel = config.parallel
    host = StoreHost(address="127.0.0.1", timeout_s=TIMEOUT_S)
    first = Generation(
        number=1,
        store=Address(host="127.0.0.1", port=host.port),
        num_verify_ranks=parallel.verify_tensor_parallel_size,
        num_draft_ranks=parallel.draft_tensor_parallel_size,
        timeout_s=TIMEOUT_S,
    )
    posts = [("draft", rank) for rank in range(1, first.num_draft_ranks)]
    posts += [("verify", rank) for rank in range(first.num_verify_ranks)]
    with ExitStack() as processes:
        for stage, rank in posts:
            processes.enter_context(peer_process(obey, config, first, stage, rank))
        yield first


def _numbered(first: Generation, number: int) -> Generation:
    return Generation(
        number=number,
        store=first.store,
        num_verify_ranks=first.num_verify_ranks,
        num_draft_ranks=first.num_draft_ranks,
        timeout_s=first.timeout_s,
    )


class Drafter:
    """The drafting actor's leader, brought from one generation to the next."""

    def __init__(self, config: EngineConfig, before: Generation) -> None:
        self.leader = leader_of(config)
        self.generation = before
        self._first = True

    def join(self, number: int) -> "Drafter":
        self.generation = _numbered(self.generation, number)
        self.leader.connect(self.generation)
        self.member = self.leader.join(self.generation, anew=self._first)
        self._first = False
        return self
