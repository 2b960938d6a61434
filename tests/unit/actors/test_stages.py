"""What a drafting actor keeps when its first engine does not come about."""

from pathlib import Path

import pytest
import ray
import torch

from eesd_dist.actors import stages as actor_stages
from eesd_dist.actors.contracts import Address, Generation
from eesd_dist.actors.stages import EngineStages
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import build_draft_shard, build_verify_stage
from eesd_dist.errors import PeerLost
from eesd_dist.telemetry.tracing import make_tracing
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.transport.seats import SingleGroup
from tests.support.tiny_service import write_tiny_service


def _generation(number: int) -> Generation:
    store = Address(host="nowhere", port=1)
    return Generation(number=number, store=store, num_verify_ranks=1, timeout_s=1.0)


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
