"""Law 1 with keys and values in bfloat16: rounded once, and read alike by every pass."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from eesd_dist.backends.cpu.model import CpuModel
from eesd_dist.backends.torch.model import TorchModel
from eesd_dist.config import EngineConfig
from eesd_dist.control.registry import CONTROLLER_NAMES
from eesd_dist.engine.build import (
    build_draft_engine,
    build_verify_stage,
    load_draft_weights,
    load_verify_weights,
)
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import LocalEngine
from eesd_dist.engine.page_store import PageStore, kv_layout
from eesd_dist.errors import ConfigError
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import KvCacheDType, LoadProgress, SpeculationParams, TreeShape
from serve_app.batch.local_engine import identity_of
from tests.support.drafters import save_head, save_target
from tests.unit.engine.test_exactness import SAMPLING, requests
from tests.unit.engine.test_kv_sharing import Pipeline, _migrate, _move, _request
from tests.unit.engine.test_trees import COST, PLAIN, engine_of, run, tree

Make = Callable[..., EngineConfig]
SHAPES: tuple[TreeShape, ...] = ("none", "static", "dynamic")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("kv")
    target = save_target(folder / "target", tail_scale=0.35)  # later layers change the result
    head = save_head(target, folder / "head", "always")

    def config(
        *,
        dtype: str = "float32",
        numerics: str = "invariant",
        kv_cache_dtype: KvCacheDType = "bfloat16",
        prefill_chunk: int = 24,
        max_running: int = 16,
        **cache: object,
    ) -> EngineConfig:
        return EngineConfig.model_validate(
            {
                "model": {
                    "path": target, "head": head, "dtype": dtype, "numerics": numerics,
                    "device": "cpu",
                },
                "cache": {
                    "page_size": 4, "num_pages": 200, "kv_cache_dtype": kv_cache_dtype, **cache,
                },
                "scheduler": {
                    "prefill_chunk": prefill_chunk, "max_running": max_running, "overlap": False,
                },
                "speculation": {
                    "max_draft_tokens": 5, "fixed_length": 4, "learn_costs": False,
                    "tree": {"widths": (3, 2, 2, 1), "branch": 3, "max_nodes": 14},
                },
            }
        )  # fmt: skip

    return config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["greedy", "warm", "biased"])
def test_no_batch_chunk_controller_or_tree_changes_a_token(
    name: str, dtype: str, make: Make
) -> None:
    """Rows read keys of their own pass, in chunks and in trees, as they read those of earlier
    ones."""
    reference = engine_of(make(dtype=dtype, prefill_chunk=256, max_running=1, prefix_caching=False))
    batch = requests(5, SAMPLING[name], PLAIN, "plain")
    plain = run(reference, batch)
    expected = plain.in_order(batch)
    for prefill_chunk in (3, 24):
        engine = engine_of(make(dtype=dtype, prefill_chunk=prefill_chunk))
        for at, controller in enumerate(CONTROLLER_NAMES):
            shape = SHAPES[at % len(SHAPES)]
            drafted = requests(5, SAMPLING[name], tree(shape, controller), controller)
            outputs = run(engine, drafted)
            assert outputs.in_order(drafted) == expected, (prefill_chunk, controller, shape)
            for request, plain_request in zip(drafted, batch, strict=True):
                logprobs = outputs.logprobs[request.request_id]
                assert logprobs == plain.logprobs[plain_request.request_id]
            if controller == "fixed":
                assert sum(outcome.num_accepted for outcome in outputs.outcomes) > 20


def test_the_type_is_that_of_the_pages_and_changes_logprobs(make: Make) -> None:
    logprobs = {}
    for setting, expected in (("auto", "float32"), ("float32", "float32"), ("bfloat16",) * 2):
        engine = engine_of(make(kv_cache_dtype=setting))
        span = engine.draft_stage.span
        assert {pages.pages_PKX.dtype for pages in span.paged._pages} == {getattr(torch, expected)}
        batch = requests(2, SAMPLING["biased"], PLAIN, "r")
        logprobs[setting] = list(run(engine, batch).logprobs.values())
    assert logprobs["auto"] == logprobs["float32"] != logprobs["bfloat16"]


def test_cached_prefixes_and_resumed_requests_go_on_with_the_same_text(make: Make) -> None:
    engine, other = engine_of(make()), engine_of(make(prefill_chunk=7))
    batch = requests(4, SAMPLING["warm"], tree("static"), "first")
    outputs = run(engine, batch)
    for at, request in enumerate(batch):
        tokens = outputs.tokens[request.request_id]
        resumed = dataclasses.replace(
            request, request_id=f"{request.request_id}-resumed", generated=tuple(tokens[: 5 + at])
        )
        for engine_after in (engine, other):
            after = run(engine_after, [resumed])
            assert after.tokens[resumed.request_id] == tokens[5 + at :]
            if engine_after is engine:
                assert after.emissions[0].num_cached_prompt_tokens > 0


def test_a_lost_verify_stage_costs_no_token(make: Make) -> None:
    config = make()

    def fresh() -> MemoryChannel:
        return MemoryChannel(build_verify_stage(config, SingleGroup()).verify)

    plain = requests(3, SAMPLING["warm"], PLAIN, "plain")
    expected = run(engine_of(config), plain).in_order(plain)
    engine = build_draft_engine(config, fresh(), cost=COST)
    batch = requests(3, SAMPLING["warm"], tree("dynamic"), "lost")
    for request in batch:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in batch}
    turns = 0
    while engine.has_work:
        turns += 1
        if turns in (4, 6):
            engine.attach(fresh(), epoch=turns)
        for emission in engine.step(wait_s=0.0).emissions:
            tokens[emission.request_id] += emission.tokens
    assert list(tokens.values()) == expected


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_pages_move_with_their_request(mode: str, make: Make) -> None:
    config = make(page_size=8)
    reference, source, target = Pipeline(config), Pipeline(config), Pipeline(config)
    request = _request("a", length=70, mode=mode)
    reference.add(request)
    reference.finish()
    source.add(request)
    while len(source.answers[request.request_id]) < 9:
        source.step()
    _migrate(source, target, [request.request_id])
    _move(source, target, request)
    target.finish()
    assert target.answers == reference.answers
    assert target.num_prefilled <= 8


def test_pipelines_with_other_types_exchange_no_pages(make: Make) -> None:
    layouts = {}
    for setting in ("auto", "float32", "bfloat16"):
        config = make(kv_cache_dtype=setting)
        layouts[setting] = kv_layout(config, layout_of(config), weights="w", head="h")
    assert layouts["auto"].why_not(layouts["float32"]) is None
    assert (
        layouts["bfloat16"].why_not(layouts["auto"])
        == "kv_dtype is bfloat16 here and float32 there"
    )


def test_the_same_bytes_hold_twice_the_tokens(make: Make) -> None:
    num_pages, num_bytes = {}, {}
    for setting in ("float32", "bfloat16"):
        config = make(kv_cache_dtype=setting, num_pages=None, kv_cache_bytes=10**6)
        draft = load_draft_weights(config, layout_of(config), SingleGroup())
        verify = load_verify_weights(config, SingleGroup())
        shard, stage = draft.shard(num_pages=3), verify.stage(num_pages=3)
        assert draft.room.page_bytes == sum(PageStore(shard.span, shard.head).page_bytes)
        assert verify.room.page_bytes == sum(PageStore(stage.span).page_bytes)
        num_bytes[setting] = draft.room.page_bytes + verify.room.page_bytes
        num_pages[setting] = LocalEngine(config).engine.load().num_pages
        assert num_pages[setting] == 10**6 // num_bytes[setting]
    assert num_bytes["float32"] == 2 * num_bytes["bfloat16"]
    assert num_pages["bfloat16"] // 2 == num_pages["float32"]


def test_fast_numerics_take_it_too(make: Make) -> None:
    engine = engine_of(make(numerics="fast", dtype="bfloat16"))
    batch = requests(2, SAMPLING["warm"], SpeculationParams(), "fast")
    assert all(run(engine, batch).in_order(batch))


def test_other_types_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'auto', 'float32' or 'bfloat16'"):
        make(kv_cache_dtype="fp8")
    setting: KvCacheDType
    for setting, dtype in (("auto", torch.float16), ("bfloat16", torch.bfloat16)):
        assert TorchModel().kv_dtype(setting, compute_dtype=dtype) == dtype
    monkeypatch.setattr(CpuModel, "kv_dtype", TorchModel.kv_dtype)  # as on a GPU
    config = make(dtype="float32")
    expected = (
        r"cache\.kv_cache_dtype is bfloat16, and the model computes in float32 on a GPU, which "
        r"stores keys and values in that type: set it to auto, or model\.dtype to bfloat16"
    )
    progress: list[LoadProgress] = []
    with pytest.raises(ConfigError, match=expected):
        load_verify_weights(config, SingleGroup(), on_progress=progress.append)
    assert not progress, "before any weights are read"


def test_the_setting_is_part_of_a_batch_runs_identity(make: Make) -> None:
    identities = [
        identity_of(make(kv_cache_dtype=setting), max_model_len=64)
        for setting in ("auto", "bfloat16")
    ]
    assert identities[0] != identities[1]
