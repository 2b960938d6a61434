"""A GPU's layers on a CPU: the kernels in Triton's interpreter, graphs as reruns of their work."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from eesd_dist.backends.cuda import attention as cuda_attention
from eesd_dist.backends.cuda import graphs
from eesd_dist.backends.cuda import layers as cuda_layers
from eesd_dist.backends.cuda.layers import CudaLayers
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan, RowSegment, row_arrays
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import SingleGroup
from tests.support.fake_cuda import as_on_gpu
from tests.support.recorded_graphs import NoRoom, recorded_graphs
from tests.support.tiny_checkpoints import save_tiny_model

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES = 4, 40
NUM_LAYERS = 2
GRAPH_ROWS = (4, 8, 16, 32)
"""Few, and less padding than on a GPU: every row takes the interpreter time."""
WINDOW: dict[str, object] = {"sliding_window": 9}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama, biases": {},
    "mistral, sliding window": WINDOW,
    "qwen3": {},
    "gemma2": WINDOW,
    "gemma3": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {},
    "olmo2": {},
}

# What attention leaves in padding rows has no meaning, and may be any number.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


def plan_of(segments: Sequence[RowSegment]) -> RowPlan:
    return RowPlan.build(segments, page_size=PAGE_SIZE, device=CPU, numerics="fast")


class Twins:
    """The same layers on the CPU and as a GPU runs them, with pages of their own."""

    def __init__(self, folder: Path) -> None:
        self.spec = ModelSpec.from_folder(folder)
        self.span = LlamaSpan.load(
            folder,
            self.spec,
            0,
            self.spec.num_layers,
            group=SingleGroup(),
            dtype="float32",
            numerics="fast",
            device=CPU,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
        )
        self.pages = [self._pages(at) for at in range(self.spec.num_layers)]
        self.twin = CudaLayers(
            self.span.paged._layers,
            self.pages,
            self.span.paged._rotations,
            hidden_size=self.spec.hidden_size,
            dtype=torch.float32,
        )

    def _pages(self, layer: int) -> LayerPages:
        pages = LayerPages(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_kv_heads=self.spec.num_kv_heads,
            queries_per_kv=self.spec.num_heads // self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=torch.float32,
            device=CPU,
            window=self.spec.sliding_windows[layer],
            scores=self.spec.traits.scores,
        )
        as_on_gpu(pages)
        return pages

    def run(self, segments: Sequence[RowSegment], x_TD: Tensor) -> tuple[Tensor, Tensor]:
        plan = plan_of(segments)
        with torch.inference_mode():
            return self.span.forward(x_TD, plan), self.twin.forward(x_TD, plan)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_layers, "GRAPH_ROWS", GRAPH_ROWS)
    monkeypatch.setattr(cuda_layers, "GRAPH_TILES", GRAPH_ROWS)
    monkeypatch.setattr(cuda_attention, "checked_tiles", lambda *_: True)
    with recorded_graphs():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_compute_what_they_do_on_a_cpu(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, num_hidden_layers=NUM_LAYERS, **FAMILIES[family])
    twins = Twins(tmp_path)
    generator = torch.Generator().manual_seed(3)
    first, second = tuple(range(10)), tuple(range(30, 12, -1))
    tree = (-1, -1, 0, 1, 2)
    passes = [
        [RowSegment(0, 12, first)],
        [RowSegment(12, 1, first), RowSegment(0, 6, second)],
        [RowSegment(13, 5, first, tree), RowSegment(6, 2, second)],
        [RowSegment(8, 7, second)],
    ]
    for segments in passes:
        num_rows = sum(segment.num_rows for segment in segments)
        x_TD = torch.randn(num_rows, twins.spec.hidden_size, generator=generator)
        before_TD = x_TD.clone()
        expected_TD, hidden_TD = twins.run(segments, x_TD)
        torch.testing.assert_close(hidden_TD, expected_TD, rtol=2e-4, atol=2e-4)
        assert torch.equal(x_TD, before_TD)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_keys_and_values_of_one_layer_are_stored_without_computing_the_rows(
    tmp_path: Path, family: str
) -> None:
    save_tiny_model(tmp_path, family, num_hidden_layers=1, **FAMILIES[family])
    stored, computed = Twins(tmp_path), Twins(tmp_path)
    plan = plan_of([RowSegment(3, 10, tuple(range(8))), RowSegment(0, 2, (30,))])
    x_TD = torch.randn(12, stored.spec.hidden_size)
    stored.twin.store_kv(x_TD, plan)
    computed.twin.forward(x_TD, plan)
    assert torch.equal(stored.pages[0].pages_PKX, computed.pages[0].pages_PKX)
    assert stored.pages[0].pages_PKX.any()


def test_a_row_has_the_same_bits_in_a_graph_of_any_size_and_without_one(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_hidden_layers=NUM_LAYERS)
    twins = Twins(tmp_path)
    table = tuple(range(12))
    x_TD = torch.randn(20, twins.spec.hidden_size)
    _, batch_TD = twins.run([RowSegment(0, 20, table)], x_TD)
    for start, count in ((0, 1), (1, 8), (9, 10), (19, 1)):
        for _ in range(2):  # the first run of a graph's size has no graph yet
            rows_TD = x_TD[start : start + count]
            _, hidden_TD = twins.run([RowSegment(start, count, table)], rows_TD)
            assert torch.equal(hidden_TD, batch_TD[start : start + count])
    plan = plan_of([RowSegment(0, 20, table)])
    seen: list[Tensor] = []
    with torch.inference_mode():
        hidden_TD = twins.twin.forward(x_TD, plan, after_layer=lambda _, x: seen.append(x.clone()))
    assert torch.equal(hidden_TD, batch_TD)
    assert torch.equal(seen[-1], batch_TD)
    assert len(seen) == twins.spec.num_layers


def test_padding_writes_no_page_and_what_a_graph_returned_stays(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_hidden_layers=NUM_LAYERS)
    twins = Twins(tmp_path)
    x_TD = torch.randn(3, twins.spec.hidden_size)
    segments = [RowSegment(0, 3, (7,))]
    twins.run(segments, x_TD)
    _, returned_TD = twins.run(segments, x_TD)
    before_TD = returned_TD.clone()
    twins.run([RowSegment(0, 3, (8,))], 2 * x_TD)
    assert torch.equal(returned_TD, before_TD)
    written = {page for page in range(NUM_PAGES) if twins.pages[0].pages_PKX[page].any()}
    assert written == {7, 8}


def test_a_longer_plan_than_its_buffer_and_other_pages_make_new_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_NUMBERS", 60)
    save_tiny_model(tmp_path, "llama", num_hidden_layers=NUM_LAYERS)
    twins = Twins(tmp_path)
    x_TD = torch.randn(5, twins.spec.hidden_size)
    _, expected_TD = twins.run([RowSegment(0, 5, tuple(range(9)))], x_TD)
    _, hidden_TD = twins.run([RowSegment(0, 5, tuple(range(39)))], x_TD)
    assert torch.equal(hidden_TD, expected_TD)
    other = [twins._pages(at) for at in range(twins.spec.num_layers)]
    twins.twin.take_pages(other)
    _, hidden_TD = twins.run([RowSegment(0, 5, tuple(range(9)))], x_TD)
    assert torch.equal(hidden_TD, expected_TD)
    assert all(pages.pages_PKX[0].any() for pages in other)


def test_without_room_for_a_graph_kernels_are_launched_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama", num_hidden_layers=NUM_LAYERS)
    twins = Twins(tmp_path)
    x_TD = torch.randn(3, twins.spec.hidden_size)
    _, expected_TD = twins.run([RowSegment(0, 3, (7,))], x_TD)
    with patch.object(graphs, "Graph", NoRoom):
        for _ in range(3):
            _, hidden_TD = twins.run([RowSegment(0, 3, (9,), (-1, 0, 1))], x_TD)
            assert torch.equal(hidden_TD, expected_TD)
        twins.run([RowSegment(0, 9, (7, 8, 9))], torch.randn(9, twins.spec.hidden_size))
    assert caplog.text.count("no_graphs") == 1


def test_one_layer_whose_tiles_change_bits_keeps_all_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first layer's check was asked for, and layers with a window have other kernels."""
    save_tiny_model(tmp_path, "gemma2", num_hidden_layers=NUM_LAYERS)
    rows = row_arrays([RowSegment(0, 3, (7,))])
    twins = Twins(tmp_path)
    assert list(twins.twin.tiles(rows).last_B) == [2]
    for is_wrong in (True, False):
        monkeypatch.setattr(
            cuda_attention,
            "checked_tiles",
            lambda shape, *_, wrong=is_wrong: (shape.window is None) != wrong,
        )
        twins.twin.take_pages(twins.pages)
        assert list(twins.twin.tiles(rows).last_B) == [0, 1, 2]
