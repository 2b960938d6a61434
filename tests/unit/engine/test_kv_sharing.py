"""A request that continues in another engine, with the pages of the first."""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree

import pytest
import torch

from eesd_dist.config import EngineConfig, SchedulerConfig, SpeculationConfig, TreeConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.build import build_draft_engine, build_draft_shard, build_verify_stage
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.page_store import PageStore, kv_layout
from eesd_dist.model.weights import weights_digest
from eesd_dist.schedule.page_leases import KvLayout, PageLease, PageReservation
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.transport.page_wire import chunks_of
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId
from tests.unit.engine.conftest import MakeConfig

PAGE = 8


class Pipeline:
    """Both stages in this process, and the tokens of each request."""

    cost: CostModel | None = None
    """Measured by the first pipeline; it decides nothing in these tests."""

    def __init__(self, config: EngineConfig) -> None:
        stage = build_verify_stage(config, SingleGroup())
        channel = MemoryChannel(stage.verify)
        self.engine: EngineCore = build_draft_engine(config, channel, cost=Pipeline.cost)
        Pipeline.cost = self.engine.cost
        self.verify = stage
        self.answers: dict[RequestId, list[TokenId]] = {}
        self.finished: set[RequestId] = set()
        self.num_prefilled = 0

    @property
    def stores(self) -> tuple[PageStore, PageStore]:
        draft = self.engine.draft_stage
        return PageStore(draft.span, draft.head), PageStore(self.verify.span)

    def add(self, request: Request) -> None:
        self.answers[request.request_id] = list(request.generated)
        self.engine.add(request)

    def step(self) -> None:
        result = self.engine.step(wait_s=0.0)
        self.finished |= set(result.finished)
        for stats in result.rounds:
            self.num_prefilled += stats.num_prefill_rows
        for emission in result.emissions:
            self.answers[emission.request_id] += emission.tokens

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()


def _config(make_config: MakeConfig, *, tree: TreeConfig | None = None) -> EngineConfig:
    return make_config(
        page_size=PAGE,
        scheduler=SchedulerConfig(prefill_chunk=24, overlap=False),
        speculation=SpeculationConfig(
            max_draft_tokens=4, controller="fixed", tree=tree or TreeConfig()
        ),
    )


def _request(name: str, *, length: int, seed: int = 3, mode: str = "auto") -> Request:
    return Request(
        request_id=RequestId(name),
        prompt=tuple(TokenId(3 + (i * i + seed) % 90) for i in range(length)),
        sampling=SamplingParams(temperature=0.8, seed=seed, max_tokens=60),
        speculation=SpeculationParams(mode="off" if mode == "off" else "auto"),
    )


def _copy(
    source: Pipeline, target: Pipeline, reservation: PageReservation, *, max_bytes: int
) -> None:
    leased: Sequence[int] = [page for page, _ in reservation.moves]
    targets: Sequence[int] = [page for _, page in reservation.moves]
    for theirs, target_store in zip(source.stores, target.stores, strict=True):
        for chunk in chunks_of(theirs.page_bytes, len(leased), max_bytes=max_bytes):
            target_store.write(chunk, targets, theirs.read(chunk, leased))


def _migrate(
    source: Pipeline, target: Pipeline, names: Sequence[RequestId], *, max_bytes: int = 5000
) -> tuple[PageLease, PageReservation]:
    lease = source.engine.kv_sharing.lease(names)
    reservation = target.engine.kv_sharing.reserve(lease.requests)
    _copy(source, target, reservation, max_bytes=max_bytes)
    assert source.engine.kv_sharing.end_lease(lease.number)
    assert target.engine.kv_sharing.adopt(reservation.number)
    return lease, reservation


def _move(source: Pipeline, target: Pipeline, request: Request) -> None:
    generated = tuple(source.answers[request.request_id])
    source.engine.abort(request.request_id)
    target.add(dataclasses.replace(request, generated=generated))


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("num_tokens", [1, 9, 30])
def test_a_moved_request_has_the_same_text_and_computes_at_most_a_page_again(
    num_tokens: int, mode: str, make_config: MakeConfig
) -> None:
    config = _config(make_config)
    reference, source, target = Pipeline(config), Pipeline(config), Pipeline(config)
    request = _request("a", length=70, mode=mode)
    reference.add(request)
    reference.finish()
    source.add(request)
    while len(source.answers[request.request_id]) < num_tokens:
        source.step()
    _migrate(source, target, [request.request_id])
    _move(source, target, request)
    target.finish()
    assert target.answers == reference.answers
    assert target.num_prefilled <= PAGE
    source.finish()
    assert source.engine.load().free_pages == source.engine.load().num_pages


def test_a_drafted_tree_moves_with_its_text(make_config: MakeConfig) -> None:
    """Its accepted branches are moved to their KV slots in the verify stage one round later."""
    tree = TreeConfig(shape="static", widths=(3, 2, 2), max_nodes=12)
    config = _config(make_config, tree=tree)
    reference, source, target = Pipeline(config), Pipeline(config), Pipeline(config)
    requests = [_request(f"r{i}", length=20 + 9 * i, seed=i) for i in range(3)]
    for request in requests:
        reference.add(request)
        source.add(request)
    target.add(_request("theirs", length=40, seed=8))
    reference.finish()
    for request in requests:
        for _ in range(5):
            source.step()
            target.step()
        lease = source.engine.kv_sharing.lease([request.request_id])
        for _ in range(2):  # both run on before the first copy
            source.step()
            target.step()
        reservation = target.engine.kv_sharing.reserve(lease.requests)
        target.step()
        _copy(source, target, reservation, max_bytes=5000)
        source.step()
        assert source.engine.kv_sharing.end_lease(lease.number)
        assert target.engine.kv_sharing.adopt(reservation.number)
        assert reservation.moves
        if request.request_id not in source.finished:
            _move(source, target, request)
    source.finish()
    target.finish()
    for request in requests:
        name = request.request_id
        moved = target.answers.get(name, source.answers[name])
        assert moved == reference.answers[name]


def test_what_arrives_is_bit_for_bit_what_left_however_it_is_cut(make_config: MakeConfig) -> None:
    config = _config(make_config)
    source, target = Pipeline(config), Pipeline(config)
    source.add(_request("a", length=70))
    for _ in range(6):
        source.step()
    lease, reservation = _migrate(source, target, [RequestId("a")], max_bytes=700)
    assert len(reservation.moves) == len(lease.requests[0].pages) >= 8
    (whole,) = chunks_of(source.stores[0].page_bytes, len(reservation.moves))
    leased, targets = zip(*reservation.moves, strict=True)
    for theirs, target_store in zip(source.stores, target.stores, strict=True):
        (whole,) = chunks_of(theirs.page_bytes, len(leased))
        content_B = theirs.read(whole, leased)
        assert content_B.any()
        assert torch.equal(target_store.read(whole, targets), content_B)


def test_rounds_of_other_requests_go_on_while_pages_are_written(
    make_config: MakeConfig,
) -> None:
    config = _config(make_config)
    reference, source, target = Pipeline(config), Pipeline(config), Pipeline(config)
    request, theirs = _request("a", length=90), _request("b", length=75, seed=11)
    for batch_request in (request, theirs):
        reference.add(batch_request)
    reference.finish()
    source.add(request)
    target.add(theirs)
    for _ in range(8):
        source.step()
    lease = source.engine.kv_sharing.lease(None)
    reservation = target.engine.kv_sharing.reserve(lease.requests)

    def write_again_and_again() -> None:
        for _ in range(5):
            _copy(source, target, reservation, max_bytes=400)

    writer = threading.Thread(target=write_again_and_again)
    writer.start()
    while writer.is_alive() and target.engine.has_work:
        target.step()
    writer.join()
    assert source.engine.kv_sharing.end_lease(lease.number)
    assert target.engine.kv_sharing.adopt(reservation.number)
    _move(source, target, request)
    target.finish()
    assert target.answers == reference.answers


def test_after_lost_stores_nothing_is_migrated(make_config: MakeConfig) -> None:
    config = _config(make_config)
    source, target = Pipeline(config), Pipeline(config)
    source.add(_request("a", length=40))
    for _ in range(4):
        source.step()
    lease = source.engine.kv_sharing.lease(None)
    reservation = target.engine.kv_sharing.reserve(lease.requests)
    for pipeline in (source, target):
        channel = MemoryChannel(pipeline.verify.verify)
        pipeline.engine.attach(channel, epoch=1)
    assert not source.engine.kv_sharing.end_lease(lease.number)
    assert not target.engine.kv_sharing.adopt(reservation.number)
    assert target.engine.kv_sharing.reserve(lease.requests).epoch == 1


def test_a_folder_that_changed_after_loading_is_not_what_the_pages_were_computed_with(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = _config(make_config)
    folder = copytree(config.model.path, tmp_path / "model")
    model = config.model.model_copy(update={"path": folder})
    config = config.model_copy(update={"model": model})

    def layouts() -> list[KvLayout]:
        layout = layout_of(config)
        return [
            kv_layout(config, layout, weights=store.weights, head="sha")
            for store in (
                PageStore(build_draft_shard(config, layout, SingleGroup()).span),
                PageStore(build_verify_stage(config, SingleGroup()).span),
            )
        ]

    old, same = layouts(), layouts()
    assert old == same
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for layout, fresh in zip(old, layouts(), strict=True):
        why_not = layout.why_not(fresh)
        assert why_not is not None
        assert why_not.startswith("weights is")


def test_layouts_agree_for_the_same_files_and_differ_for_others(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = _config(make_config)
    layout = layout_of(config)
    reference = kv_layout(config, layout, weights="w", head="sha")
    assert reference.why_not(kv_layout(config, layout, weights="w", head="sha")) is None
    assert (
        reference.why_not(kv_layout(config, layout, weights="w", head="other"))
        == "head is sha here and other there"
    )
    other = copytree(config.model.path, tmp_path / "other")
    assert weights_digest(other) == weights_digest(config.model.path)
    (file,) = other.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_digest(other) != weights_digest(config.model.path)
