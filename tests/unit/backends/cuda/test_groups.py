"""Graphs of a stage's ranks as threads: kernels in Triton's interpreter, recorded graphs."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from eesd_dist.backends.cuda import attention as cuda_attention
from eesd_dist.backends.cuda import layers as cuda_layers
from eesd_dist.backends.cuda import steps, verifier
from eesd_dist.backends.cuda.verifier import GraphVerifier
from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.engine.build import build_draft_shard
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.profile import greedy_segment
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport import rank_sums
from eesd_dist.transport.contracts import RoundHeader
from eesd_dist.transport.group_handles import GroupHandle
from eesd_dist.types import ChoiceParams
from tests.support.captured_ranks import CapturedRanks, on_captured_ranks
from tests.support.recorded_graphs import RecordedGraph
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.backends.cuda.test_drafter import (
    assert_same,
    by_steps,
    drafter_on_gpu,
    on_gpu,
    starts,
)
from tests.unit.engine.conftest import MakeConfig

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES = 4, 8
ROUNDS = [(1, 1), (1, 1), (2, 1)]
"""Rows of the requests, of which the second one has noise."""

# What attention leaves in padding rows has no meaning, and may be any number.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (steps, verifier, cuda_layers):  # padding takes the interpreter time, too
            patch.setattr(module, "GRAPH_ROWS", (2, 4))
        patch.setattr(cuda_layers, "GRAPH_TILES", (2, 4))
        patch.setattr(cuda_attention, "checked_tiles", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one layer")
    save_tiny_model(folder, num_hidden_layers=1)
    return folder


class Rank:
    """A rank of a verify stage that computes as on a GPU."""

    def __init__(self, folder: Path, group: CapturedRanks) -> None:
        self.group = group
        self.handle = GroupHandle(group)
        self.span = LlamaSpan.load(
            folder,
            ModelSpec.from_folder(folder),
            0,
            1,
            group=self.handle,
            dtype="float32",
            numerics="fast",
            device=CPU,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
        )
        on_gpu(self.span.paged, hidden_size=self.span.spec.hidden_size)
        graphs = GraphVerifier.of(self.span)
        assert graphs is not None
        self.graphs = graphs
        self.stage = VerifyStage(
            span=self.span, group=self.handle, page_size=PAGE_SIZE, device=CPU, numerics="fast"
        )
        self.stage._verifier = LazyCompiled(lambda: graphs, is_ready=True)

    def tokens(self) -> list[list[int]]:
        """Returns the tokens of some rounds."""
        for pages in self.span.paged._pages:
            pages.clear()
        generator = torch.Generator().manual_seed(7)
        tokens: list[list[int]] = []
        for number, lengths in enumerate(ROUNDS):
            segments = [
                replace(
                    greedy_segment(start=2 * number, num_rows=num_rows, pages=(at, 2 + at)),
                    params=ChoiceParams(temperature=0.9 * at, seed=at),
                )
                for at, num_rows in enumerate(lengths)
            ]
            header = RoundHeader(epoch=1, round_id=number, segments=tuple(segments))
            width = self.span.spec.hidden_size
            hidden_TD = torch.randn(sum(lengths), width, generator=generator)
            tokens.append(self.stage.verify(header, hidden_TD, None).tokens.tolist())
        return tokens

    def tokens_without_graphs(self) -> list[list[int]]:
        """Returns the same tokens, of kernels that are launched one by one without padding."""
        self.handle.join(self.group.placement.everyone)
        tokens = self.tokens()
        assert not self.graphs._graphs.by_key
        assert len({token for row in tokens for token in row}) > 3
        self.handle.join(self.group)
        return tokens


SUMS = 2
"""Sums of a layer; a verify pass also gathers."""


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "num_cuts"),
    [(2, 2, 0), (2, None, SUMS + 1), (4, None, SUMS + 1), (4, 2, SUMS + 1)],
    ids=["one node", "NCCL sums", "NCCL gathers", "nodes of two"],
)
def test_ranks_verify_in_graphs_of_their_epoch_what_they_do_without(
    folder: Path, num_ranks: int, per_node: int | None, num_cuts: int
) -> None:
    def run(group: CapturedRanks) -> None:
        rank = Rank(folder, group)
        expected = rank.tokens_without_graphs()
        assert rank.tokens() == expected
        before = dict(rank.graphs._graphs.by_key)
        assert [size.num_rows for size in before] == [2, 4]
        assert group.plane.watched.count("replay") == num_cuts + 1
        assert all(graph.num_cuts == num_cuts for graph, _ in before.values())
        rank.graphs._graphs.has_room = False  # a capture that a lost peer has ended
        rank.handle.join(CapturedRanks(group.placement, epoch=2))
        assert rank.tokens() == expected
        after = rank.graphs._graphs.by_key
        assert after.keys() == before.keys()
        assert all(after[size][0] is not graph for size, (graph, _) in before.items())

    on_captured_ranks(num_ranks, run, per_node=per_node)


@pytest.mark.parametrize(("num_ranks", "per_node"), [(2, 2), (4, None), (4, 2)])
def test_a_rank_without_room_launches_what_its_peers_replay(
    folder: Path, num_ranks: int, per_node: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    without_room: set[int] = set()

    class Room(RecordedGraph):
        def capture(self, work: Callable[[], Tensor]) -> int:
            if threading.get_ident() in without_room:
                raise torch.OutOfMemoryError("no room")
            return super().capture(work)

    def run(group: CapturedRanks) -> None:
        rank = Rank(folder, group)
        if group.rank == 1:
            without_room.add(threading.get_ident())
        expected = rank.tokens_without_graphs()
        assert rank.tokens() == expected
        assert bool(rank.graphs._graphs.by_key) == (group.rank != 1)

    on_captured_ranks(num_ranks, run, per_node=per_node, graph=Room)
    assert caplog.text.count("no_graphs verifying") == 1


@pytest.mark.parametrize("whole_bytes", [16, 1 << 20], ids=["shares", "whole"])
@pytest.mark.parametrize("per_node", [None, 2])
def test_sums_over_three_nodes_are_those_of_all_ranks(
    per_node: int | None, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_sums, "WHOLE_BYTES", whole_bytes)
    generator = torch.Generator().manual_seed(7)
    summands = [torch.randn(3, 11, generator=generator).half() for _ in range(6)]

    def run(group: CapturedRanks) -> Tensor:
        return group.all_reduce(summands[group.rank].clone())

    for total in on_captured_ranks(6, run, per_node=per_node):
        assert torch.equal(total, rank_sums.pairwise_sum(summands))


def test_a_rank_that_keeps_rows_after_layers_sums_with_peers_that_do_not(folder: Path) -> None:
    """Draft rank 0 records rows for training, and its followers do not know."""

    def run(group: CapturedRanks) -> None:
        span = Rank(folder, group).span
        layers = span.paged.fused
        assert layers is not None
        seen: list[Tensor] = []

        def keep(done: int, rows_TD: Tensor) -> None:
            seen.append(rows_TD.clone())

        plan = RowPlan.build(
            [RowSegment(0, 3, (0,))], page_size=PAGE_SIZE, device=CPU, numerics="fast"
        )
        generator = torch.Generator().manual_seed(7)
        x_TD = torch.randn(3, span.spec.hidden_size, generator=generator)
        with torch.inference_mode():
            expected_TD = layers.forward(x_TD, plan).clone()
            out_TD = layers.forward(x_TD, plan, after_layer=keep if group.rank == 0 else None)
        assert torch.equal(out_TD, expected_TD)
        assert all(torch.equal(rows_TD, expected_TD) for rows_TD in seen)
        assert len(seen) == (group.rank == 0)

    on_captured_ranks(2, run)


@pytest.mark.parametrize("case", ["graphs", "a rank without room", "several nodes"])
@pytest.mark.parametrize("head", ["sometimes", "truncated"])
def test_ranks_draft_in_steps_what_calls_of_every_part_draft(
    head: str, case: str, make_config: MakeConfig
) -> None:
    config = make_config(head)

    def run(group: CapturedRanks) -> list[list[int]]:
        shard = build_draft_shard(config, layout_of(config), GroupHandle(group))
        drafter = drafter_on_gpu(shard)
        graphs = drafter._steps._graphs
        graphs.has_room = case != "a rank without room" or group.rank == 0
        chains = starts(shard, num=6, seed=1)[2:]
        expected = [by_steps(shard, chain) for chain in chains]
        with torch.inference_mode():
            for _ in range(2):  # the first step of a size has no graph yet
                _, drafted = drafter.draft(chains)
                assert_same(drafted, expected)
        assert bool(graphs.by_key) == graphs.has_room
        return [chain.tokens for chain in drafted]

    rank0, rank1 = on_captured_ranks(2, run, per_node=None if case == "several nodes" else 2)
    assert rank0 == rank1
    assert sum(map(len, rank0)) > 3
