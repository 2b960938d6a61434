"""Graphs of ranks of a group: host calls of a pass, and what an abort leaves.

Runs without a GPU, on tensors without values: a graph records what is launched while it is
captured. The plane is NCCL's, over a toy backend, with sums in memory that launch nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.distributed_c10d import Store

from eesd_dist.backends.cuda.tiles import Tiling
from eesd_dist.backends.cuda.verifier import GraphVerifier, _Size
from eesd_dist.errors import PeerLost
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.page_table import PageTable
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import GroupHandle, SingleGroup, UnconnectedGroup
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.transport.symmetric import sums
from eesd_dist.transport.symmetric.sums import SymmetricSums
from tests.support.fake_cuda import GPU, HostCopies, fake_cuda
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.transport.symmetric_ranks import HostMemory
from tests.unit.transport.test_nccl_plane import Backend, Stream

PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 16, 8, 4
SIZES = [1, 2, 8]
NUM_ROWS = 5
Checkpoint = tuple[Path, ModelSpec]


class Own(Backend):
    """The toy backend of these tests."""

    backends: ClassVar[list[Backend]] = []


class Launches:
    """Kernels and graphs that were launched, those that a capture records left out."""

    kernels = sums = captures = replays = 0

    def __init__(self) -> None:
        self.is_capturing = False

    def kernel(self, *, is_sum: bool) -> Any:
        launches = self

        class Kernel:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                return lambda *_, **__: launches.count(is_sum=is_sum)

        return Kernel()

    def count(self, *, is_sum: bool) -> None:
        if not self.is_capturing:
            self.kernels += 1
            self.sums += is_sum

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.is_capturing = Stream.is_capturing = True
        self.captures += 1
        try:
            yield
        finally:
            self.is_capturing = Stream.is_capturing = False


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Returns a folder and what is read from it: reading needs values."""
    folder = tmp_path_factory.mktemp("eight heads")
    save_tiny_model(
        folder,
        "llama",
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return folder, ModelSpec.from_folder(folder)


@pytest.fixture
def launches(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    Own.backends = []
    launches = Launches()

    class Counted:
        def __init__(self, pool: object) -> None:
            self._exchanges: list[Callable[..., None]] = []

        def capture(self, work: Callable[[], Tensor]) -> int:
            with launches.capturing():
                self._out = work()
            return 0

        def cut(self, exchange: Callable[..., None], *tensors: Tensor) -> None:
            self._exchanges.append(partial(exchange, *tensors))

        def replay(self, operation: str = "") -> Tensor:
            launches.replays += 1 + len(self._exchanges)
            for exchange in self._exchanges:
                exchange(operation=operation)
            return self._out

    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", Own, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Stream.is_capturing)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", lambda index: None, raising=False)
    monkeypatch.setattr(sums, "sum_kernel", launches.kernel(is_sum=True))
    monkeypatch.setattr(sums, "gather_kernel", launches.kernel(is_sum=True))
    monkeypatch.setattr(sums, "gathered_sum_kernel", launches.kernel(is_sum=False))
    with fake_cuda(kernel=launches.kernel(is_sum=False), graph=Counted):
        yield launches


def group_of(size: int, *, epoch: int, in_memory: bool = True) -> ProcessGroup:
    plane = NcclPlane(
        cast(Store, None), rank=0, size=size, timeout_s=60.0, join_timeout_s=1.0, device=GPU
    )
    with unset_fake_temporarily():  # which have addresses
        memories = [torch.zeros(64, dtype=torch.uint8)] * size
        symmetric = SymmetricSums(HostMemory(memories), rank=0, device=torch.device("cpu"))
    if in_memory:
        plane.sum_in_memory(symmetric)
    return ProcessGroup(
        name="verify",
        epoch=epoch,
        rank=0,
        members=[f"verify rank {rank}" for rank in range(size)],
        timeout_s=60.0,
        device=GPU,
        links=cast(Any, None),
        nccl=plane,
    )


class Rank:
    """Rank 0 of a stage of so many."""

    def __init__(self, checkpoint: Checkpoint, size: int, *, in_memory: bool = True) -> None:
        self.handle = GroupHandle(
            SingleGroup() if size == 1 else UnconnectedGroup(rank=0, size=size)
        )
        folder, spec = checkpoint
        self.span = LlamaSpan.load(
            folder,
            spec,
            0,
            spec.num_layers,
            group=self.handle,
            dtype="bfloat16",
            numerics="fast",
            device=GPU,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
        )
        if size > 1:
            self.group = group_of(size, epoch=1, in_memory=in_memory)
            self.handle.join(self.group)

    @torch.inference_mode()
    def run(self) -> HostCopies:
        """Runs a pass; returns its operators."""
        rows = RowPlan.build(
            [RowSegment(20, NUM_ROWS, PageTable((1, 2)))],
            page_size=PAGE_SIZE,
            device=GPU,
            numerics="invariant",
        )
        x_TD = torch.zeros(NUM_ROWS, self.span.spec.hidden_size, device=GPU)
        with HostCopies() as operators:
            self.span.forward(x_TD, rows)
        return operators


def test_a_replay_costs_the_host_as_much_at_any_degree(
    launches: Launches, checkpoint: Checkpoint
) -> None:
    operators = []
    for size in SIZES:
        rank = Rank(checkpoint, size)
        before = launches.kernels, launches.sums
        rank.run()
        num_sums = 2 * NUM_LAYERS if size > 1 else 0
        assert launches.sums - before[1] == num_sums
        assert launches.kernels - before[0] == 5 * NUM_LAYERS + num_sums  # cuBLAS' left out
        before = launches.kernels, launches.replays
        replay = rank.run()
        assert (launches.kernels, launches.replays) == (before[0], before[1] + 1)
        assert replay.to_the_host == []
        operators.append(replay.num_operators)
    assert operators == [operators[0]] * len(SIZES)


@pytest.mark.parametrize("size", [2, 8])
def test_sums_that_a_graph_cannot_hold_are_queued_between_its_pieces(
    launches: Launches, checkpoint: Checkpoint, size: int
) -> None:
    rank = Rank(checkpoint, size, in_memory=False)
    rank.run()
    calls = Own.backends[0].asked
    calls.clear()
    before = launches.kernels, launches.replays
    rank.run()
    num_sums = 2 * NUM_LAYERS
    assert calls == [{2: "allreduce", 8: "allgather"}[size]] * num_sums
    assert (launches.kernels, launches.replays) == (before[0], before[1] + 1 + num_sums)


@pytest.mark.parametrize("size", SIZES)
def test_a_verify_pass_is_one_graph_with_its_gather(
    launches: Launches, checkpoint: Checkpoint, size: int
) -> None:
    rank = Rank(checkpoint, size)
    verifier = GraphVerifier.of(rank.span)
    assert verifier is not None
    key = _Size(8, 8, Tiling(8, 4), has_filters=False, keeps_logits=False)
    with HostCopies() as copies, torch.inference_mode():
        for _ in range(3):
            best_GS4 = verifier._graphs.run(key, lambda: verifier._pass(key))
    assert best_GS4.shape == (size, 8, 4)
    assert copies.to_the_host == []
    assert (launches.captures, launches.replays) == (1, 2)
    if size > 1:
        by_kind = rank.group.counts().by_kind
        assert by_kind["all_reduce"].number == 3 * 2 * NUM_LAYERS  # a pass and two replays
        assert by_kind["all_gather"].number == 3
        sum_bytes = 8 * rank.span.spec.hidden_size * 2
        assert by_kind["all_reduce"].traffic.sent_bytes == 3 * 2 * NUM_LAYERS * (
            (size - 1) * sum_bytes
        )


def test_capture_abort_and_capture_again(launches: Launches, checkpoint: Checkpoint) -> None:
    rank = Rank(checkpoint, 2)
    for _ in range(2):
        rank.run()
    assert (launches.captures, launches.replays) == (1, 1)
    assert rank.group._nccl is not None
    rank.group._nccl._give_up("replay of round 7")
    with pytest.raises(PeerLost, match="replay of round 7"):
        rank.run()
    rank.handle.join(group_of(2, epoch=2))
    before = launches.replays
    for _ in range(2):
        rank.run()
    assert (launches.captures, launches.replays) == (2, before + 1)
