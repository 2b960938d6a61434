"""Transfers and collectives between GPUs over NCCL, with the deadlines that NCCL lacks.

NCCL's wait only orders streams: the host runs on, and with a dead peer the kernel never ends. So
nothing here blocks the host. A `Watchdog` polls an event after each piece of work, also after each
replay of a graph, and aborts the plane when the deadline has passed. The kernels then end, threads
that wait for the device wake up, and the group raises PeerLost at its next check. A plane without
references is aborted too: a communicator holds GPU memory.

Ranks of one node sum and gather in each other's memory (`symmetric.sums`), unless the tensor is
large; ranks of several nodes sum in each node first, then over the nodes. A CUDA graph can hold
what is done in memory. It cannot hold NCCL's work, since the abort of a communicator waits for such
graphs: the graph is cut there, and the work is queued between its pieces (`NcclPlane.capturing`).
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, Work
from torch.distributed.distributed_c10d import Store

from eesd_dist.devices import HOST
from eesd_dist.errors import ConfigError
from eesd_dist.transport.rank_sums import SUMMED_IN_FLOAT32, pairwise_sum, sum_over_ranks
from eesd_dist.transport.watchdog import QueuedWork, Watchdog

if TYPE_CHECKING:
    from eesd_dist.transport.symmetric.sums import SymmetricSums

logger = logging.getLogger(__name__)


NO_DEADLINE = timedelta(days=3650)


class CollectiveBackend(Protocol):
    """Methods of torch's NCCL backend that its type stubs lack."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...
    def allreduce(self, tensors: list[Tensor], /) -> Work: ...
    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work: ...
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], /
    ) -> Work: ...
    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions, /) -> Work: ...
    def abort(self) -> None: ...


class QueuedExchange(Protocol):
    """Work between two pieces of a graph."""

    def __call__(self, *tensors: Tensor, operation: str) -> None:
        """Queues it on the current stream. Raises RuntimeError."""
        ...


Cut = Callable[..., None]
"""`cut(exchange, *tensors)` ends a piece of a graph: before the next one `exchange` is called with
tensors of the same memory."""


class Communicator(NamedTuple):
    """Ranks that call NCCL together."""

    backend: CollectiveBackend
    size: int


class NcclPlane:
    """Collectives and transfers between the GPUs of one epoch of one group."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        join_timeout_s: float,
        device: torch.device,
        ordered_sums: bool = True,
    ) -> None:
        """`ordered_sums`: sums over three ranks or more are taken in pairs, as `numerics:
        invariant` needs; otherwise in the order that NCCL chooses.

        Raises ConfigError for a device that is not one GPU.
        """
        if device == HOST or device.index is None:
            raise ConfigError(
                f"an NCCL group on device {device}: expected one GPU with its index, like cuda:0"
            )
        # torch's watchdog would end the process; this one aborts the group, to be built again.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # or torch polls the store from a thread
        torch.cuda.set_device(device)
        self._watching = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._stores: list[Store] = []
        self._firsts: list[Work] = []
        """Work of each communicator that has ended, by which torch is asked for errors."""
        self._ordered_sums = ordered_sums
        self._symmetric: SymmetricSums | None = None
        self._cut: Cut | None = None
        self._lost: str | None = None
        give_up = weakref.WeakMethod(self._give_up)  # the watchdog's thread must not keep the plane

        def on_timeout(operation: str) -> None:
            if (living := give_up()) is not None:
                living(operation)

        self._watchdog = Watchdog(timeout_s=timeout_s, on_timeout=on_timeout)
        # Runs once: from the watchdog, from `abort`, or when the plane is collected.
        self._ends = [self._watchdog.stop]
        self._aborts: list[Callable[[], None]] = []
        self._end = weakref.finalize(self, _end_all, self._ends, self._aborts)
        self._end.atexit = False  # the driver frees what an ending process holds
        self._everyone = self._join(store, rank=rank, size=size, timeout_s=join_timeout_s)
        self._nodes: Communicator | None = None
        """Ranks with this one's place on their nodes, where sums are taken over nodes."""

    def sum_in_memory(self, symmetric: "SymmetricSums") -> None:
        """Sums in the memory of a node from now on, on every rank."""
        self._symmetric = symmetric
        self._ends.append(symmetric.abort)

    def sum_over_nodes(
        self,
        symmetric: "SymmetricSums",
        store: Store,
        *,
        node: int,
        num_nodes: int,
        timeout_s: float,
    ) -> None:
        """Sums in each node's memory from now on, then over the nodes, on every rank.

        `symmetric`: the sums of this rank's node, its part of the sum in pairs; `store`: for the
        ranks that have this one's place on the nodes. Raises RuntimeError.
        """
        self._nodes = self._join(store, rank=node, size=num_nodes, timeout_s=timeout_s)
        self.sum_in_memory(symmetric)

    @contextmanager
    def capturing(self, cut: Cut) -> Iterator[None]:
        """Encloses what a CUDA graph captures: NCCL's work is not queued but given to `cut`."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None

    @property
    def lost(self) -> str | None:
        """The operation that missed its deadline or met an error of its communicator, or None."""
        with self._watchdog.judging:
            return self._lost

    def all_reduce(self, x: Tensor, *, operation: str) -> Tensor:
        """Returns the sum: in pairs with `ordered_sums` over three ranks or more, or in symmetric
        memory; otherwise NCCL's own, in place."""
        if self._symmetric is not None and self._symmetric.fits(x):
            if self._nodes is None:
                total = self._symmetric.sum(x)
            else:
                exchange = _NcclExchange(self, self._nodes, x.dtype, operation)
                node_sum = self._symmetric.sum(x, dtype=torch.float32)
                total = sum_over_ranks(node_sum, exchange, size=self._nodes.size)
            self.watch_queued(operation=operation)
            return total
        backend, size = self._everyone
        if self._ordered_sums and size > 2:
            exchange = _NcclExchange(self, self._everyone, x.dtype, operation)
            return sum_over_ranks(x, exchange, size=size)
        self.queue(lambda x: backend.allreduce([x]), x, operation=operation)
        return x

    def all_gather(self, x: Tensor, *, operation: str) -> Tensor:
        """Returns every rank's x, [G, *x.shape], in rank order."""
        symmetric = self._symmetric if self._nodes is None else None
        if symmetric is not None and symmetric.fits_gather(x):
            gathered = symmetric.gather(x)
            self.watch_queued(operation=operation)
            return gathered
        return _NcclExchange(self, self._everyone, x.dtype, operation).gathered(x)

    def broadcast(self, x: Tensor, *, source: int, operation: str) -> None:
        options = BroadcastOptions()
        options.rootRank = source
        self._order(self._everyone.backend.broadcast([x], options), operation=operation)

    def recv(self, x: Tensor, *, source: int, operation: str) -> None:
        self._order(self._everyone.backend.recv([x], source, 0), operation=operation)

    def isend(self, x: Tensor, *, to: int, operation: str) -> None:
        """Sends without ordering streams: later kernels do not wait for the peer. The caller keeps
        `x` unchanged until the peer has answered."""
        work = self._everyone.backend.send([x], to, 0)
        with torch.cuda.stream(self._watching):
            work.wait()
            self.watch_queued(operation=operation)

    def watch_queued(self, *, operation: str) -> None:
        """Gives everything queued on the current stream so far its deadline. Work that is being
        captured has none: each replay of its graph has."""
        if torch.cuda.is_current_stream_capturing():
            return
        event = torch.cuda.current_stream().record_event()
        work = QueuedWork(event, self._firsts, self._watching)
        self._watchdog.watch(work, operation=operation)

    def queue(self, start: Callable[..., Work], *tensors: Tensor, operation: str) -> None:
        """Queues work of NCCL over these tensors; cuts a graph that is being captured."""
        if self._cut is not None:
            # A graph does not keep the plane, which is aborted when it is not used any more.
            self._cut(partial(_queue_again, weakref.ref(self), start), *tensors)
        else:
            self._order(start(*tensors), operation=operation)

    def abort(self) -> None:
        self._end()

    def _join(self, store: Store, *, rank: int, size: int, timeout_s: float) -> Communicator:
        """Builds a communicator. Raises RuntimeError, and then has aborted the plane."""
        from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from builds for the CPU

        options = ProcessGroupNCCL.Options()
        options._timeout = NO_DEADLINE
        # torch asks the store for each pair's first transfer, and does not keep it.
        self._stores.append(store)
        try:
            backend = cast(CollectiveBackend, ProcessGroupNCCL(store, rank, size, options))
            self._aborts.append(backend.abort)
            # The first collective builds the communicator; a wait with a timeout blocks.
            first = backend.allreduce([torch.zeros(1, device=self._device)])
            first.wait(timedelta(seconds=timeout_s))
        except BaseException:
            self.abort()
            raise
        self._firsts.append(first)
        return Communicator(backend, size)

    def _order(self, work: Work, *, operation: str) -> None:
        work.wait()
        self.watch_queued(operation=operation)

    def _give_up(self, operation: str) -> None:
        logger.error("nccl work is late, aborting: operation=%s", operation)
        self._lost = operation
        self._end()


class _NcclExchange:
    """Implements `rank_sums.Exchange` for one sum, under its operation's name."""

    def __init__(
        self, plane: NcclPlane, communicator: Communicator, dtype: torch.dtype, operation: str
    ) -> None:
        """`dtype`: that of the sum."""
        self._plane = plane
        self._backend, self._size = communicator.backend, communicator.size
        self._dtype = dtype
        self._operation = operation

    def gathered(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self._size, *x.shape))
        self._plane.queue(
            self._backend._allgather_base, gathered, x.contiguous(), operation=self._operation
        )
        return gathered

    def swapped(self, x_GW: Tensor) -> Tensor:
        received_GW = torch.empty_like(x_GW)
        backend = self._backend
        self._plane.queue(
            lambda received_GW, x_GW: backend.alltoall_base(received_GW, x_GW, [], []),
            received_GW,
            x_GW.contiguous(),
            operation=self._operation,
        )
        return received_GW

    def summed(self, x_GN: Tensor) -> Tensor:
        if x_GN.dtype not in SUMMED_IN_FLOAT32:
            return pairwise_sum(x_GN.unbind())
        from eesd_dist.transport.symmetric.sums import sum_of_gathered  # needs Triton

        return sum_of_gathered(x_GN, self._dtype)


def _queue_again(
    plane: "weakref.ref[NcclPlane]",
    start: Callable[..., Work],
    *tensors: Tensor,
    operation: str,
) -> None:
    living = plane()
    if living is None:
        raise RuntimeError("its communicators were given up")
    living.queue(start, *tensors, operation=operation)


def _end_all(ends: Sequence[Callable[[], None]], aborts: Sequence[Callable[[], None]]) -> None:
    """Aborts communicators at once: the abort of one may wait for the kernels of another one."""
    for end in ends:
        end()
    others = [threading.Thread(target=abort, daemon=True) for abort in aborts[1:]]
    for thread in others:
        thread.start()
    for abort in aborts[:1]:
        abort()
    for thread in others:
        thread.join()
