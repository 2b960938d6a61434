"""What workers keep when their first engine or an epoch fails."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import ray
import torch

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_verify_stage, load_draft_weights
from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.transport.authentication.key_store import StoreClient, StoreHost
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import GroupHandle, SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.workers import draft_follower, draft_leader, verify_rank, verify_worker
from eesd_dist.workers.draft_follower import ShardFollower
from eesd_dist.workers.draft_leader import EngineLeader
from eesd_dist.workers.epochs import epoch_groups
from eesd_dist.workers.messages import Address, Epoch
from eesd_dist.workers.verify_worker import StageVerifier
from tests.support.tiny_service import write_tiny_service


def _epoch(number: int, *, num_ranks: int = 1) -> Epoch:
    """Returns an epoch with this many ranks in either stage."""
    return Epoch(
        number=number,
        store=Address(host="nowhere", port=1),
        num_verify_ranks=num_ranks,
        num_draft_ranks=num_ranks,
        timeout_s=1.0,
        num_pages=64,
    )


@pytest.mark.parametrize("is_prepared", [False, True])
def test_draft_weights_are_read_once_though_the_first_peer_is_lost(
    is_prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0

    def read(*args: object, **options: object) -> object:
        nonlocal num_read
        num_read += 1
        return load_draft_weights(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "here")
    monkeypatch.setattr(draft_leader, "load_draft_weights", read)
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(write_tiny_service(tmp_path)), "dtype": "float32"},
            "cache": {"num_pages": 64},
            "scheduler": {"max_running": 2},
        }
    )
    verify_stage = build_verify_stage(config, SingleGroup())

    def lost(
        header: RoundHeader, hidden_TD: torch.Tensor, draft_probs_KV: torch.Tensor | None
    ) -> VerifyReply:
        raise PeerLost(peer="verify rank 0", operation="receive", reason="its connection is gone")

    leader = EngineLeader(config, Tracing())
    if is_prepared:
        leader.prepare()
    with pytest.raises(PeerLost, match="its connection is gone"):
        leader._build(MemoryChannel(lost), _epoch(1), None)
    running = leader._build(MemoryChannel(verify_stage.verify), _epoch(2), None)
    assert num_read == 1
    assert running.engine.cost is not None
    leader._build(MemoryChannel(verify_stage.verify), _epoch(3), None)
    assert num_read == 2, "an engine that broke may have spoilt its own"


class ToyGroup:
    def __init__(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.is_aborted = False

    def abort(self, reason: str) -> None:
        self.is_aborted = True


class Rendezvous:
    """All ranks connect at once, except to groups that fail."""

    def __init__(self) -> None:
        self.groups: list[ToyGroup] = []
        self.failing: str | None = None

    def build(self, store: object, *, epoch: int, name: str, **_: object) -> ToyGroup:
        if name == self.failing:
            raise PeerLost(peer="verify rank 1", operation="joining", reason="it did not join")
        self.groups.append(ToyGroup(name, epoch))
        return self.groups[-1]

    @property
    def left(self) -> list[tuple[str, int]]:
        return [(group.name, group.epoch) for group in self.groups if group.is_aborted]


def _config() -> EngineConfig:
    """Returns a configuration with two ranks in either stage."""
    parallel = {"draft_tensor_parallel_size": 2, "verify_tensor_parallel_size": 2}
    return EngineConfig.model_validate({"model": {"path": "."}, "parallel": parallel})


@pytest.fixture
def local_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a node address and the layout of a checkpoint."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    layout = SimpleNamespace(device=torch.device("cpu"))
    for module in (draft_follower, draft_leader, epoch_groups, verify_worker):
        monkeypatch.setattr(module, "layout_of", lambda _: layout)


@pytest.fixture
def meeting(local_node: None, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    rendezvous = Rendezvous()
    monkeypatch.setattr(StoreClient, "connect", lambda *_, **__: None)
    monkeypatch.setattr(epoch_groups, "build_group", rendezvous.build)
    return rendezvous


def _lost(*_: object, **__: object) -> object:
    raise PeerLost(peer="verify rank 0", operation="receive", reason="its connection is gone")


def test_groups_that_were_connected_and_not_joined_end_with_the_next_epoch(
    meeting: Rendezvous,
) -> None:
    leader = EngineLeader(_config(), Tracing())
    leader.connect(_epoch(1, num_ranks=2))
    assert meeting.left == []
    leader.connect(_epoch(2, num_ranks=2))
    assert meeting.left == [("rounds", 1), ("draft", 1)]
    leader.disconnect()
    assert meeting.left == [("rounds", 1), ("draft", 1), ("rounds", 2), ("draft", 2)]


def test_groups_without_an_engine_end_when_they_are_left(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_leader, "DistVerifyChannel", lambda _: None)
    leader = EngineLeader(_config(), Tracing())
    monkeypatch.setattr(leader, "_build", _lost)
    leader.connect(_epoch(1))
    with pytest.raises(PeerLost):
        leader.join(_epoch(1), new_engine=True)
    leader.disconnect()
    assert meeting.left == [("rounds", 1)]


def test_groups_that_an_epoch_has_are_its_own_to_end(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_leader, "DistVerifyChannel", lambda _: None)
    monkeypatch.setattr(draft_leader, "serving_head", lambda *_: None)
    leader = EngineLeader(_config(), Tracing())
    monkeypatch.setattr(leader, "_build", lambda *_: SimpleNamespace(engine=SimpleNamespace()))
    leader.connect(_epoch(1, num_ranks=2))
    draft_epoch = leader.join(_epoch(1, num_ranks=2), new_engine=True)
    leader.disconnect()
    assert meeting.left == []
    draft_epoch.abort()
    assert meeting.left == [("rounds", 1), ("draft", 1)]


def test_a_group_is_left_when_the_second_one_of_its_rank_does_not_come_about(
    meeting: Rendezvous,
) -> None:
    meeting.failing = "draft"
    with pytest.raises(PeerLost):
        EngineLeader(_config(), Tracing()).connect(_epoch(1, num_ranks=2))
    assert meeting.left == [("rounds", 1)]
    meeting.failing = "verify"
    with pytest.raises(PeerLost):
        StageVerifier(_config(), Tracing(), rank=0).join(_epoch(2, num_ranks=2))
    assert meeting.left == [("rounds", 1), ("rounds", 2)]


def test_ranks_that_cannot_load_leave_their_groups(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_rank, "load_verify_weights", _lost)
    monkeypatch.setattr(draft_follower, "load_draft_weights", _lost)
    monkeypatch.setattr(GroupHandle, "join", lambda *_: None)
    with pytest.raises(PeerLost):
        StageVerifier(_config(), Tracing(), rank=0).join(_epoch(1, num_ranks=2))
    assert meeting.left == [("rounds", 1), ("verify", 1)]
    follower = ShardFollower(_config(), rank=1)
    with pytest.raises(PeerLost):
        follower.join(_epoch(2, num_ranks=2))
    assert meeting.left == [("rounds", 1), ("verify", 1), ("draft", 2)]
    with pytest.raises(EngineError, match="no pages can be moved now: this rank is being built"):
        follower.pages.layout()
    with pytest.raises(EngineError, match="cannot take other now: this rank is being built"):
        follower.load_head("other")


class HostRounds:
    """A source of one round, with its tensors in host memory."""

    def __init__(self, group: object) -> None:
        del group

    def next_round(self) -> tuple[str, torch.Tensor, torch.Tensor]:
        return "header", torch.zeros(2, 3), torch.zeros(1, 4)


def test_rounds_through_the_host_are_moved_to_the_verifier_s_device(
    local_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setattr(verify_worker, "layout_of", lambda _: layout)
    monkeypatch.setattr(verify_worker, "DistRoundSource", HostRounds)
    verifier = StageVerifier(_config(), Tracing(), rank=0)
    group = cast("ProcessGroup", None)
    received = verifier._source(replace(_epoch(1), is_degraded=True), group).next_round()
    assert received is not None
    hidden_TD, draft_probs_KV = received[1:]
    assert draft_probs_KV is not None
    assert hidden_TD.device == draft_probs_KV.device == layout.device


def test_a_leader_names_the_head_that_it_drafts_with() -> None:
    config = _config()
    assert EngineLeader(config, Tracing()).head_folder == ""
    model = config.model.model_copy(update={"head": Path("/heads/one")})
    configured = config.model_copy(update={"model": model})
    assert EngineLeader(configured, Tracing()).head_folder == "/heads/one"


def test_a_leader_that_waits_for_a_peer_waits_no_longer_than_it_is_wanted(local_node: None) -> None:
    leader = EngineLeader(_config(), Tracing())
    host = StoreHost()
    epoch = Epoch(
        number=1,
        store=host.at,
        num_verify_ranks=1,
        timeout_s=60.0,
        num_pages=64,
    )
    leaving = threading.Timer(0.3, leader.disconnect)
    leaving.start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        leader.connect(epoch)
    assert time.monotonic() - started_s < 20.0
