"""Which rounds are one graph, and what it reads, with toys in place of layers and LM head."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from eesd_dist.backends.cuda import graphs as cuda_graphs
from eesd_dist.backends.cuda import verifier
from eesd_dist.backends.cuda.tiles import DeviceRows, RowTiles, single_tiles
from eesd_dist.backends.cuda.verifier import GraphVerifier
from eesd_dist.engine.profile import greedy_segment
from eesd_dist.model.kv_layout import RowArrays
from eesd_dist.transport.contracts import Segment
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.types import ChoiceParams
from tests.support.recorded_graphs import NoRoom, recorded_graphs

HIDDEN = VOCAB = 64


class PageLayers:
    """After these layers a row is one-hot at the first page of its table."""

    group = SingleGroup()

    def has_graphs(self, num_rows: int) -> bool:
        return num_rows <= 16

    def tiles(self, arrays: RowArrays) -> RowTiles:
        return single_tiles(arrays, counts=(4, 8, 16))

    def run(self, x_TD: Tensor, rows: DeviceRows) -> Tensor:
        first_T = rows.slots[rows.table_T.long()]
        return functional.one_hot(first_T.long(), HIDDEN) + 0 * x_TD


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verifier, "GRAPH_ROWS", (4, 8, 16))
    with recorded_graphs():
        yield


def toy_verifier() -> GraphVerifier:
    span = SimpleNamespace(
        paged=SimpleNamespace(device=torch.device("cpu")),
        spec=SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB),
        compute_dtype=torch.float32,
    )
    return GraphVerifier(cast(Any, span), cast(Any, PageLayers()), cast(Any, torch.nn.Identity()))


def segment(*pages: int, num_rows: int = 3, num_sampled: int = 1, masks: bytes = b"") -> Segment:
    rows = greedy_segment(start=0, num_rows=num_rows, pages=pages)
    return replace(rows, num_sampled=num_sampled, masks=masks)


def tokens_of(graphs: GraphVerifier, *segments: Segment) -> list[int] | None:
    hidden_TD = torch.zeros(sum(s.num_rows for s in segments), HIDDEN)
    verified = graphs.verify(segments, hidden_TD, [])
    return None if verified is None else verified.tokens_S.tolist()


def test_tokens_follow_the_sampled_rows_of_each_segment() -> None:
    graphs = toy_verifier()
    segments = segment(8, 9, num_sampled=2), segment(4, 3, num_sampled=0), segment(1, 2)
    for _ in range(2):  # the first run of a graph's size has no graph yet
        assert tokens_of(graphs, *segments) == [8, 8, 1]
    assert len(graphs._graphs.by_key) == 1
    assert tokens_of(graphs, *reversed(segments)) == [1, 8, 8]


def test_logits_of_open_rows_outlive_the_next_graph() -> None:
    graphs = toy_verifier()
    segments = segment(8, 9, num_sampled=2), segment(4, 3), segment(1, 2)
    hidden_TD = torch.zeros(9, HIDDEN)
    for open_rows in ([1], [0, 3], [0, 1, 2, 3]):
        verified = graphs.verify(segments, hidden_TD, open_rows)
        assert verified is not None
        graphs.verify([segment(33, 2, num_rows=9)], hidden_TD, [])
        pages = [(8, 8, 4, 1)[row] for row in open_rows]
        assert verified.logits_OV.argmax(dim=-1).tolist() == pages
        if len(open_rows) < 4:
            assert verified.tokens_S.tolist() == [8, 8, 4, 1]


def test_all_graphs_keep_their_logits_in_the_same_memory() -> None:
    graphs = toy_verifier()
    for num_rows in (1, 6, 12):
        graphs.verify([segment(8, 9, num_rows=num_rows)], torch.zeros(num_rows, HIDDEN), [0])
    logits_SV = graphs._logits_SV
    assert logits_SV is not None
    assert {size.keeps_logits for size in graphs._graphs.by_key} == {True}
    assert all(graph._out.shape == (1, 4, 4) for graph, _ in graphs._graphs.by_key.values())
    assert tokens_of(graphs, segment(8, 9)) == [8]
    assert graphs._logits_SV is logits_SV


def test_filters_of_open_rows_are_left_to_the_rule() -> None:
    graphs = toy_verifier()
    filtered = replace(segment(8, 9), params=ChoiceParams(temperature=0.5, top_k=3))
    graphs.verify([filtered, segment(5, 2)], torch.zeros(6, HIDDEN), [0])
    graphs.verify([filtered, segment(5, 2)], torch.zeros(6, HIDDEN), [])
    assert [size.has_filters for size in graphs._graphs.by_key] == [False, True]


def test_a_filtered_row_without_a_choice_is_open() -> None:
    """Noise decides between 64 tokens, of which filters keep one."""
    graphs = toy_verifier()
    narrow = [
        replace(
            segment(8, 9),
            params=ChoiceParams(temperature=temperature, top_k=1, top_p=0.9, seed=3),
        )
        for temperature in (0.01, 1e6, 0.01)
    ]
    for open_rows, expected in (([], [2]), ([0], [0, 2]), ([0, 1, 2, 3], [0, 1, 2, 3])):
        verified = graphs.verify([segment(5, 2), *narrow], torch.zeros(12, HIDDEN), open_rows)
        assert verified is not None
        assert verified.open_rows == expected
        assert verified.logits_OV.argmax(dim=-1).tolist() == [
            5 if row == 0 else 8 for row in expected
        ]
        if len(open_rows) < 4:
            assert verified.tokens_S[[0, 1, 3]].tolist() == [5, 8, 8]


def test_a_longer_plan_than_its_buffer_makes_new_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_NUMBERS", 90)
    graphs = toy_verifier()
    assert tokens_of(graphs, segment(8, 9)) == [8]
    before = dict(graphs._graphs.by_key)
    assert tokens_of(graphs, segment(*range(50, 0, -1))) == [50]
    assert tokens_of(graphs, segment(8, 9)) == [8]
    assert before
    assert not before.items() & graphs._graphs.by_key.items()


@pytest.mark.parametrize(
    "segments",
    [
        (segment(1, num_sampled=0),),
        (segment(1, num_rows=9), segment(2, num_rows=8)),
    ],
    ids=["no sampled row", "more rows than a graph has"],
)
def test_other_rounds_have_no_graph(segments: tuple[Segment, ...]) -> None:
    assert tokens_of(toy_verifier(), *segments) is None


def test_logits_of_a_graph_take_no_more_memory_than_those_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier, "logits_block", lambda vocab_size: 7)
    graphs = toy_verifier()
    assert tokens_of(graphs, segment(1, num_rows=6, num_sampled=4)) == [1] * 4
    assert tokens_of(graphs, segment(1, num_rows=6, num_sampled=5)) is None  # eight with padding


def test_without_room_for_a_graph_kernels_are_launched_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs = toy_verifier()
    with patch.object(cuda_graphs, "Graph", NoRoom):
        for _ in range(2):
            assert tokens_of(graphs, segment(8, 9)) == [8]
    assert not graphs._graphs.by_key
    assert caplog.text.count("no_graphs verifying") == 1
