"""A leader with verify rank 0 in its process."""

from pathlib import Path

import pytest
import ray

from eesd_dist.config import EngineConfig
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.local import LocalEngine
from eesd_dist.errors import EngineError
from eesd_dist.telemetry.tracing import Tracing
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from eesd_dist.workers import verify_rank
from eesd_dist.workers.draft_leader import EngineLeader
from eesd_dist.workers.messages import Address, Epoch
from tests.support.tiny_service import write_tiny_service

_NUM_PAGES = 64


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"path": str(write_tiny_service(tmp_path)), "dtype": "float32"},
            "cache": {"num_pages": _NUM_PAGES},
            "scheduler": {"max_running": 2},
        }
    )


@pytest.fixture
def leader(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> EngineLeader:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return EngineLeader(config, Tracing(), holds_verify_rank=True)


def _epoch(number: int, *, num_pages: int = _NUM_PAGES) -> Epoch:
    return Epoch(
        number=number,
        store=Address(host="nowhere", port=1),
        num_verify_ranks=1,
        timeout_s=1.0,
        num_pages=num_pages,
    )


def _request() -> Request:
    return Request(
        request_id=RequestId("one"),
        prompt=(TokenId(5), TokenId(17), TokenId(30)),
        sampling=SamplingParams(max_tokens=40, temperature=0.8, seed=2),
        speculation=SpeculationParams(controller="fixed"),
    )


def _begin(leader: EngineLeader, number: int, *, new_engine: bool = False) -> EngineCore:
    leader.connect(_epoch(number))
    return leader.join(_epoch(number), new_engine=new_engine).engine


def _tokens(engine: EngineCore, *, num_tokens: int | None = None) -> list[TokenId]:
    """Steps until the request has ended, or has so many tokens."""
    tokens: list[TokenId] = []
    while engine.has_work and (num_tokens is None or len(tokens) < num_tokens):
        for emission in engine.step(wait_s=0.0).emissions:
            tokens += emission.tokens
    return tokens


def _plain(config: EngineConfig) -> list[TokenId]:
    speculation = config.speculation.model_copy(update={"max_draft_tokens": 0})
    local = LocalEngine(config.model_copy(update={"speculation": speculation}))
    (generation,) = local.generate([_request()])
    local.close()
    return generation.tokens


def test_a_request_goes_on_in_the_next_epoch_with_the_tokens_of_plain_decoding(
    leader: EngineLeader, config: EngineConfig
) -> None:
    leader.prepare()
    engine = _begin(leader, 1)
    engine.add(_request())
    tokens = _tokens(engine, num_tokens=10)
    assert _begin(leader, 2) is engine
    tokens += _tokens(engine)
    assert tokens == _plain(config)


def test_the_verify_rank_is_loaded_once_though_an_engine_breaks(
    leader: EngineLeader, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_loads = 0
    load = verify_rank.load_verify_weights

    def count(*args: object, **options: object) -> object:
        nonlocal num_loads
        num_loads += 1
        return load(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(verify_rank, "load_verify_weights", count)
    first = leader.prepare()
    broken = _begin(leader, 1)
    engine = _begin(leader, 2, new_engine=True)
    assert engine is not broken
    engine.add(_request())
    assert _tokens(engine) == _plain(config)
    assert num_loads == 1
    assert leader.prepare() == first


def test_its_room_and_its_pages_are_those_of_both_stages(
    leader: EngineLeader, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dedicated = EngineLeader(config, Tracing())
    shared_bytes = leader.prepare().room.page_bytes
    draft_bytes = dedicated.prepare().room.page_bytes
    with pytest.raises(EngineError, match="the engine is being built"):
        leader.pages.layout()
    _begin(leader, 1)
    store = leader._page_store()
    assert sum(store.page_bytes) == shared_bytes > draft_bytes
    assert leader.pages.layout().num_layers == 4


def test_the_stages_do_not_overlap(leader: EngineLeader) -> None:
    engine = _begin(leader, 1)
    assert engine._overlap_policy is None
    assert engine._scheduler.num_microbatches == 1
