"""Pages of real stages are sized from the bytes that the stages would take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import load_draft_weights, load_verify_weights
from eesd_dist.engine.kv_room import fallback_bytes, kv_room
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import LocalEngine
from eesd_dist.engine.page_store import PageStore
from eesd_dist.errors import ConfigError, PromptTooLong
from eesd_dist.model.rank_memory import CPU_BUDGET_BYTES, held_bytes
from eesd_dist.transport.group_handles import SingleGroup, UnconnectedGroup
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from tests.support.tiny_service import write_tiny_service

CACHE = {"page_size": 16}


def _config(folder: Path, *, cache: dict[str, Any], **sections: Any) -> EngineConfig:
    model = {"path": str(folder), "dtype": "float32", "device": "cpu", **sections.pop("model", {})}
    return EngineConfig.model_validate({"model": model, "cache": CACHE | cache, **sections})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_service(tmp_path_factory.mktemp("model") / "tiny")


def _request(length: int, *, max_tokens: int = 4) -> Request:
    prompt = tuple(TokenId(1 + i % 300) for i in range(length))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(request_id=RequestId(f"r{length}"), prompt=prompt, sampling=sampling)


def test_the_bytes_of_a_page_are_those_that_the_stages_allocate(folder: Path) -> None:
    config, group = _config(folder, cache={"kv_cache_bytes": 10**6}), SingleGroup()
    draft = load_draft_weights(config, layout_of(config), group)
    verify = load_verify_weights(config, group)
    shard, stage = draft.shard(num_pages=3), verify.stage(num_pages=3)
    assert draft.room.page_bytes == sum(PageStore(shard.span, shard.head).page_bytes)
    assert verify.room.page_bytes == sum(PageStore(stage.span).page_bytes)
    assert draft.room.budget_bytes == verify.room.budget_bytes == 10**6


def test_a_verify_rank_with_a_fallback_keeps_pages_for_the_fallbacks_layers_too(
    folder: Path,
) -> None:
    parallel = {"draft_tensor_parallel_size": 1, "verify_tensor_parallel_size": 2}
    rooms = {}
    for fallback in (False, True):
        config = _config(folder, cache={}, parallel=parallel | {"fallback": fallback})
        for rank in range(2):
            weights = load_verify_weights(config, UnconnectedGroup(rank=rank, size=2))
            rooms[fallback, rank] = weights.room.page_bytes
    plain = config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"max_draft_tokens": 0})}
    )
    fallback_room = load_draft_weights(plain, layout_of(plain), SingleGroup()).room
    assert rooms[True, 0] == rooms[False, 0] + fallback_room.page_bytes
    assert rooms[True, 1] == rooms[False, 1] == rooms[False, 0]


def test_the_weights_that_a_fallback_will_load_are_counted_from_headers(folder: Path) -> None:
    config = _config(folder, cache={}, speculation={"max_draft_tokens": 0})
    layout = layout_of(config)
    progress = []
    load_draft_weights(config, layout, SingleGroup(), on_progress=progress.append)
    num_bytes = fallback_bytes(
        folder, layout.spec, split=layout.split, rank=0, size=1, dtype=layout.dtype
    )
    assert num_bytes == progress[-1].bytes_total


def test_an_engine_has_the_pages_that_fit_and_answers_only_what_they_hold(folder: Path) -> None:
    sizing = LocalEngine(_config(folder, cache={"num_pages": 1}))
    draft, verify = (
        sizing.engine.draft_stage,
        load_verify_weights(_config(folder, cache={}), SingleGroup()),
    )
    page = sum(PageStore(draft.span, draft.head).page_bytes) + verify.room.page_bytes
    engine = LocalEngine(_config(folder, cache={"kv_cache_bytes": 12 * page + page // 2}))
    roomy = LocalEngine(_config(folder, cache={}))
    assert engine.engine.load().num_pages == 12
    assert roomy.engine.load().num_pages == CPU_BUDGET_BYTES // page
    request = _request(12 * 16 - 4)
    assert engine.generate([request])[0].tokens == roomy.generate([request])[0].tokens
    with pytest.raises(PromptTooLong, match=str(12 * 16 - 1)):
        engine.generate([_request(12 * 16)])
    with pytest.raises(ConfigError, match="max_model_len is 193, and the KV pages of this process"):
        LocalEngine(
            _config(
                folder,
                cache={"kv_cache_bytes": 12 * page},
                model={"max_model_len": 193},
            )
        )


def test_on_a_gpu_pages_get_what_weights_activations_and_a_fallback_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(folder, cache={"gpu_memory_utilization": 0.5})
    layers = load_verify_weights(config, SingleGroup()).span.layers
    on_gpu = SimpleNamespace(
        device=torch.device("cuda", 0),
        spec=layers.spec,
        num_ranks=1,
        dtype=layers.dtype,
    )
    # Figures of a card of 8 GB; there is none here.
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * 10**9, 8 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10**9)

    def room(**options: int) -> int:
        return kv_room(config, on_gpu, page_bytes=1000, **options).budget_bytes  # type: ignore[arg-type]

    left = room() + held_bytes(
        hidden_size=layers.spec.hidden_size,
        intermediate_size=layers.spec.intermediate_size,
        num_ranks=1,
        bytes_per_value=layers.dtype.itemsize,
    )
    assert 2.9 * 10**9 < left < 3 * 10**9, "half of the card, less the weights and activations"
    assert room() - room(deferred_bytes=10**9) == 10**9
    fixed = config.model_copy(
        update={"cache": config.cache.model_copy(update={"kv_cache_bytes": 12345})}
    )
    assert kv_room(fixed, on_gpu, page_bytes=1000).budget_bytes == 12345  # type: ignore[arg-type]
