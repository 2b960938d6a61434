"""CUDA graphs of the work of a stage, and the numbers that they read.

A graph replays launches at fixed addresses. Ranks of a group replay the same graphs, in this epoch
only. What a graph cannot hold, such as NCCL's work, is queued between its pieces.
"""

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import zip_longest
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.model.kv_layout import Ints
from eesd_dist.model.layers.captures import CAPTURES
from eesd_dist.transport.contracts import TensorGroup
from eesd_dist.transport.counts import CapturedCounts
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.group_handles import process_group_of
from eesd_dist.transport.nccl import QueuedExchange

_CAPTURING = Lock()
"""torch captures one graph of a process at a time."""
_MOST_GRAPHS = 128
"""Graphs that are kept: a size of long contexts has others than one of short ones."""
_NUMBERS = 1 << 16
"""First size of a buffer for what a pass uploads."""

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")


class NumberBuffer:
    """Int32 numbers on a GPU that graphs read, uploaded from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros(_NUMBERS, dtype=torch.int32, device=device)
        self._pinned = self._new_pinned()
        self._uploaded: torch.cuda.Event | None = None

    def write(self, numbers: Ints) -> bool:
        """Uploads them to the beginning of the buffer. Returns True if they had no room: the buffer
        is another one now, and graphs that read the former one are of no use."""
        has_grown = len(numbers) > len(self.on_device)
        if has_grown:
            self.on_device = self.on_device.new_zeros(2 * len(numbers))
            self._pinned = self._new_pinned()
        elif self._uploaded is not None:
            self._uploaded.synchronize()  # before the pinned memory is written again
        pinned = self._pinned.narrow(0, 0, len(numbers))
        pinned.copy_(torch.from_numpy(numbers))
        self.on_device.narrow(0, 0, len(numbers)).copy_(pinned, non_blocking=True)
        if pinned.is_pinned():
            self._uploaded = torch.cuda.current_stream(self.on_device.device).record_event()
        return has_grown

    def _new_pinned(self) -> Tensor:
        has_gpu = self.on_device.is_cuda and torch.cuda.is_available()
        return torch.zeros(len(self.on_device), dtype=torch.int32, pin_memory=has_gpu)


class Graphs(Generic[K, T]):
    """Graphs by what they are captured for, and the numbers that all of them read."""

    def __init__(self, device: torch.device, *, name: str, group: TensorGroup) -> None:
        """`name`: what the graphs do, for the log; `group`: the ranks that sum in them."""
        self._name = name
        self._group = group
        self._epoch = 0
        self._device = device
        self._buffer = NumberBuffer(device)
        self._pool = _graph_pool(device)
        self.has_room = True
        """False once a graph could not be captured: work is launched kernel by kernel then, until
        the group's next epoch."""
        self.by_key: dict[K, tuple[Graph[T], CapturedCounts | None]] = {}
        """Graphs with the counts of their sums; None for a group of one."""
        self._num_bytes = 0
        """Memory that captures have taken."""

    @property
    def numbers(self) -> Tensor:
        """The numbers of the latest `upload` on the device, with what is behind them."""
        return self._buffer.on_device

    def upload(self, numbers: Ints) -> None:
        if self._buffer.write(numbers):
            self.clear()

    def clear(self) -> None:
        """Drops all graphs. The next ones get other memory, since that of a failed capture is of no
        use."""
        self.by_key.clear()
        self._pool = _graph_pool(self._device)
        self._num_bytes = 0

    def run(self, key: K, work: Callable[[], T]) -> T:
        """Returns the output of the work, launched as a graph from its second run with this key on.
        The next run may overwrite it. The work reads and writes the same memory in every run of an
        epoch. Raises PeerLost."""
        group = process_group_of(self._group)
        if group is not None and group.epoch != self._epoch:  # its memory is the former plane's
            self._epoch = group.epoch
            self.clear()
            self.has_room = True
        graph, captured = self.by_key.get(key, (None, None))
        if graph is None:
            CAPTURES.count += 1
            out = work()  # compiles the kernels
            if self.has_room:
                self._capture(key, work, group)
            return out
        self.by_key[key] = self.by_key.pop(key)  # the latest one
        if group is None or captured is None:
            return graph.replay()
        with group.replaying(captured) as operation:
            return graph.replay(operation)

    def _capture(self, key: K, work: Callable[[], T], group: ProcessGroup | None) -> None:
        """Captures the work, of which no kernel runs: no rank waits for another one."""
        graph: Graph[T] = Graph(self._pool)
        started_s = time.perf_counter()
        try:
            if group is None:
                self._num_bytes += graph.capture(work)
                self.by_key[key] = graph, None
            else:
                with group.capturing(graph.cut) as captured:
                    self._num_bytes += graph.capture(work)
                self.by_key[key] = graph, captured
        except PeerLost:
            raise
        except (RuntimeError, EngineError) as error:  # no memory, or no operation of graphs
            logger.warning("no_graphs %s key=%s error=%s", self._name, key, error)
            self.has_room = False
            self.clear()
        else:
            if len(self.by_key) > _MOST_GRAPHS:
                del self.by_key[next(iter(self.by_key))]
            logger.info(
                "graph_captured %s key=%s seconds=%.2f graphs=%d mib=%d",
                self._name, key, time.perf_counter() - started_s, len(self.by_key),
                self._num_bytes >> 20,
            )  # fmt: skip


class Graph(Generic[T]):
    """Kernels that were launched once, to be launched again together, in pieces between which other
    work is queued."""

    def __init__(self, pool: Any) -> None:
        """`pool`: memory that graphs share; one is replayed at a time, and its output copied."""
        self._pool = pool
        self._is_capturing = False
        self._pieces: list[torch.cuda.CUDAGraph] = []
        self._exchanges: list[QueuedExchange] = []

    def capture(self, work: Callable[[], T]) -> int:
        """Returns the bytes of the GPU that it took. Raises RuntimeError where the work cannot be
        captured."""
        with _CAPTURING:
            torch.cuda.synchronize()  # fails next to a capture of another thread
            torch.cuda.empty_cache()
            free_before, _ = torch.cuda.mem_get_info()
            with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
                self._begin_piece()
                try:
                    self._out = work()
                finally:
                    if self._is_capturing:
                        self._end_piece()
            free, _ = torch.cuda.mem_get_info()
        return max(0, free_before - free)

    def cut(self, exchange: QueuedExchange, *tensors: Tensor) -> None:
        """Ends a piece: before the next one `exchange` is called in each replay, with the memory
        that these tensors have now. Later launches of the capture may be given that memory. Raises
        EngineError where that fails."""
        try:
            self._end_piece()
            self._exchanges.append(partial(exchange, *map(memory_of, tensors)))
            self._begin_piece()
        except RuntimeError as error:  # which a group would take for a lost peer
            raise EngineError(f"a CUDA graph could not be cut: {error}") from error

    def replay(self, operation: str = "") -> T:
        """Returns the output, which the next replay overwrites. `operation`: name of the replay in
        errors of its exchanges."""
        for graph, exchange in zip_longest(self._pieces, self._exchanges):
            graph.replay()
            if exchange is not None:
                exchange(operation=operation)
        return self._out

    def _begin_piece(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU at the same time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._is_capturing = True
        self._pieces.append(graph)

    def _end_piece(self) -> None:
        self._is_capturing = False
        self._pieces[-1].capture_end()


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """Returns the stream of all captures on a GPU: memory is used again on its own stream only."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def memory_of(x: Tensor) -> Tensor:
    """Returns a tensor of the same memory of a GPU, which it does not keep allocated."""
    memory = torch.as_tensor(_Memory(x), device=x.device)
    return memory.view(x.dtype).view(x.shape)


class _Memory:
    """Bytes of a GPU, by numba's CUDA array interface, version 3."""

    def __init__(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": (x.nbytes,),
            "typestr": "|u1",
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def _graph_pool(device: torch.device) -> Any:
    """Returns a pool of memory for graphs; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()
