"""What an actor keeps when its first engine, or a generation, does not come about."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_draft_shard, build_verify_stage
from eesd_dist.errors import PeerLost
from eesd_dist.telemetry.tracing import make_tracing
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.transport.rendezvous import StoreHost
from eesd_dist.transport.seats import SingleGroup
from eesd_dist.workers import stages as actor_stages
from eesd_dist.workers.messages import Address, Generation
from eesd_dist.workers.stages import EngineStages
from tests.support.tiny_service import write_tiny_service


def _generation(number: int, *, num_ranks: int = 1) -> Generation:
    """Of as many ranks in either stage."""
    return Generation(
        number=number,
        store=Address(host="nowhere", port=1),
        num_verify_ranks=num_ranks,
        num_draft_ranks=num_ranks,
        timeout_s=1.0,
    )


@pytest.mark.parametrize("is_prepared", [False, True])
def test_draft_weights_are_read_once_though_the_first_peer_is_lost(
    is_prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0

    def read(*args: object, **options: object) -> object:
        nonlocal num_read
        num_read += 1
        return build_draft_shard(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "here")
    monkeypatch.setattr(actor_stages, "build_draft_shard", read)
    monkeypatch.setattr("eesd_dist.engine.build.build_draft_shard", read)
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

    stages = EngineStages(config, make_tracing(process="test", service="test", endpoint=None))
    if is_prepared:
        stages.prepare_draft(rank=0)
    with pytest.raises(PeerLost, match="its connection is gone"):
        stages._build_engine(MemoryChannel(lost), _generation(1))
    engine = stages._build_engine(MemoryChannel(verify_stage.verify), _generation(2))
    assert num_read == 1
    assert engine.cost is not None
    stages._build_engine(MemoryChannel(verify_stage.verify), _generation(3))
    assert num_read == 2, "an engine that broke may have spoilt its own"


class ToyGroup:
    def __init__(self, name: str, generation: int) -> None:
        self.name, self.generation = name, generation
        self.is_aborted = False

    def abort(self, reason: str) -> None:
        self.is_aborted = True


class Rendezvous:
    """Everybody comes at once, except to groups that fail."""

    def __init__(self) -> None:
        self.groups: list[ToyGroup] = []
        self.failing: str | None = None

    def build(self, store: object, *, generation: int, name: str, **_: object) -> ToyGroup:
        if name == self.failing:
            raise PeerLost(peer="verify rank 1", operation="joining", reason="it did not join")
        self.groups.append(ToyGroup(name, generation))
        return self.groups[-1]

    @property
    def left(self) -> list[tuple[str, int]]:
        return [(each.name, each.generation) for each in self.groups if each.is_aborted]


def _stages(monkeypatch: pytest.MonkeyPatch) -> EngineStages:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    layout = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(actor_stages, "layout_of", lambda _: layout)
    config = EngineConfig.model_validate({"model": {"path": "."}})
    return EngineStages(config, make_tracing(process="test", service="test", endpoint=None))


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    rendezvous = Rendezvous()
    monkeypatch.setattr(actor_stages, "connect_store", lambda *_, **__: None)
    monkeypatch.setattr(actor_stages, "build_group", rendezvous.build)
    return rendezvous


def _lost(*_: object, **__: object) -> object:
    raise PeerLost(peer="verify rank 0", operation="receive", reason="its connection is gone")


def test_groups_that_were_connected_and_not_joined_end_with_the_next_generation(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = _stages(monkeypatch)
    stages.connect_draft(_generation(1, num_ranks=2))
    assert meeting.left == []
    stages.connect_draft(_generation(2, num_ranks=2))
    assert meeting.left == [("rounds", 1), ("draft", 1)]
    stages.disconnect()
    assert meeting.left == [("rounds", 1), ("draft", 1), ("rounds", 2), ("draft", 2)]


def test_groups_whose_engine_did_not_come_about_end_when_they_are_left(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_stages, "DistVerifyChannel", lambda _: None)
    stages = _stages(monkeypatch)
    monkeypatch.setattr(stages, "_build_engine", _lost)
    stages.connect_draft(_generation(1))
    with pytest.raises(PeerLost):
        stages.join_draft(_generation(1), anew=True)
    stages.disconnect()
    assert meeting.left == [("rounds", 1)]


def test_groups_that_a_member_has_are_its_own_to_end(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_stages, "DistVerifyChannel", lambda _: None)
    monkeypatch.setattr(actor_stages, "_serving_head", lambda *_: None)
    stages = _stages(monkeypatch)
    monkeypatch.setattr(stages, "_build_engine", lambda *_: SimpleNamespace())
    stages.connect_draft(_generation(1, num_ranks=2))
    member = stages.join_draft(_generation(1, num_ranks=2), anew=True)
    stages.disconnect()
    assert meeting.left == []
    member.abort()
    assert meeting.left == [("rounds", 1), ("draft", 1)]


def test_a_group_is_left_when_the_second_one_of_its_rank_does_not_come_about(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = _stages(monkeypatch)
    meeting.failing = "draft"
    with pytest.raises(PeerLost):
        stages.connect_draft(_generation(1, num_ranks=2))
    assert meeting.left == [("rounds", 1)]
    meeting.failing = "verify"
    with pytest.raises(PeerLost):
        stages.join_verify(_generation(2, num_ranks=2), rank=0)
    assert meeting.left == [("rounds", 1), ("rounds", 2)]


def test_ranks_that_cannot_load_leave_their_groups(
    meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = _stages(monkeypatch)
    monkeypatch.setattr(stages, "_verify_stage_in", _lost)
    monkeypatch.setattr(stages, "_load_follower", _lost)
    monkeypatch.setattr(actor_stages, "LatestGroup", lambda group: group)
    with pytest.raises(PeerLost):
        stages.join_verify(_generation(1, num_ranks=2), rank=0)
    assert meeting.left == [("rounds", 1), ("verify", 1)]
    with pytest.raises(PeerLost):
        stages.join_draft_follower(_generation(2, num_ranks=2), rank=1)
    assert meeting.left == [("rounds", 1), ("verify", 1), ("draft", 2)]


def test_who_connects_and_waits_for_a_peer_waits_no_longer_than_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = _stages(monkeypatch)
    host = StoreHost()
    generation = Generation(
        number=1,
        store=Address(host="127.0.0.1", port=host.port),
        num_verify_ranks=1,
        timeout_s=60.0,
    )
    leaving = threading.Timer(0.3, stages.disconnect)
    leaving.start()
    started_s = time.monotonic()
    with pytest.raises(PeerLost):
        stages.connect_draft(generation)
    assert time.monotonic() - started_s < 20.0
