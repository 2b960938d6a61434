"""The plane that moves tensors between GPUs, and the deadline that NCCL does not have.

NCCL's wait only orders streams: the host runs on, and a dead peer is a kernel that never ends. So
nothing here blocks the host. Each piece of work is handed to a `Watchdog`, which asks whether it
has finished and, when its deadline is past, aborts the communicator, so that the kernels end and
whoever waits for the device wakes up; the group then raises PeerLost at its next check. A plane
that nobody holds any more is aborted as well: a communicator keeps memory of its GPU.
"""

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, Work
from torch.distributed.distributed_c10d import Store

from eesd_dist.errors import ConfigError
from eesd_dist.transport.gloo import NO_DEADLINE, TransferBackend
from eesd_dist.transport.rank_sums import sum_over_ranks

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class DeviceWork(Protocol):
    def is_completed(self) -> bool: ...


class CollectiveBackend(TransferBackend, Protocol):
    """What torch's NCCL backend does and its type stubs leave out."""

    def allreduce(self, tensors: list[Tensor], /) -> Work: ...
    def _allgather_base(self, output: Tensor, input: Tensor, /) -> Work: ...
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], /
    ) -> Work: ...
    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions, /) -> Work: ...
    def abort(self) -> None: ...


class Watchdog:
    """Calls `on_late(operation)` once when work is not done by its deadline, in its own thread.

    Work finishes in the order it was started, so only the oldest piece is asked.
    """

    def __init__(
        self, *, timeout_s: float, on_late: Callable[[str], None], poll_s: float = _POLL_S
    ) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._poll_s = poll_s
        self._watched: queue.SimpleQueue[tuple[DeviceWork, str, float] | None]
        self._watched = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="nccl watchdog", daemon=True)
        self._thread.start()

    def watch(self, work: DeviceWork, *, operation: str) -> None:
        self._watched.put((work, operation, time.monotonic() + self._timeout_s))

    def stop(self) -> None:
        """Takes no lock of ours: the collector may call it in the midst of anything."""
        self._is_stopped = True
        self._watched.put(None)

    def _run(self) -> None:
        while (watched := self._watched.get()) is not None:
            work, operation, deadline = watched
            while not self._is_stopped and not work.is_completed():
                if time.monotonic() >= deadline:
                    self._on_late(operation)
                    return
                time.sleep(self._poll_s)


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
        """`ordered_sums`: sums over three ranks or more are taken in rank order, as `numerics:
        invariant` needs them; else as NCCL finds quickest.

        Raises ConfigError for a device that is not one GPU.
        """
        if device.type != "cuda" or device.index is None:
            raise ConfigError(
                f"an NCCL group on device {device}: expected one GPU with its index, like cuda:0"
            )
        from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from builds for the CPU

        # torch's own watchdog would end the process; ours aborts the group, to be built again.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = NO_DEADLINE
        self._backend = cast(CollectiveBackend, ProcessGroupNCCL(store, rank, size, options))
        self._size = size
        self._ordered_sums = ordered_sums
        self._lost: str | None = None
        give_up = weakref.WeakMethod(self._give_up)  # the watchdog's thread must not keep the plane

        def on_late(operation: str) -> None:
            if (living := give_up()) is not None:
                living(operation)

        self._watchdog = Watchdog(timeout_s=timeout_s, on_late=on_late)
        # Once only: by the watchdog, by `abort`, or when nobody holds this any more.
        self._end = weakref.finalize(self, _end, self._watchdog, self._backend)
        self._end.atexit = False  # the driver takes back what an ending process has
        try:  # the first collective builds the communicator; its wait, with a timeout, blocks
            self._backend.allreduce([torch.zeros(1, device=device)]).wait(
                timedelta(seconds=join_timeout_s)
            )
        except BaseException:
            self.abort()
            raise

    @property
    def lost(self) -> str | None:
        """The operation that did not finish in time, or None while all is well."""
        return self._lost

    def all_reduce(self, x: Tensor, *, operation: str) -> Tensor:
        """With `ordered_sums` in rank order, whatever NCCL would choose; else in place."""
        if self._ordered_sums and self._size > 2:
            return sum_over_ranks(x, _NcclExchange(self, operation), size=self._size)
        self._order(self._backend.allreduce([x]), operation=operation)
        return x

    def all_gather(self, x: Tensor, *, operation: str) -> Tensor:
        """[G, *x.shape] every rank's x, in rank order."""
        parts = x.new_empty((self._size, *x.shape))
        self._order(self._backend._allgather_base(parts, x.contiguous()), operation=operation)
        return parts

    def all_to_all(self, x_GW: Tensor, *, operation: str) -> Tensor:
        """[G, W] in row g what rank g had for this rank."""
        parts_GW = torch.empty_like(x_GW)
        work = self._backend.alltoall_base(parts_GW, x_GW.contiguous(), [], [])
        self._order(work, operation=operation)
        return parts_GW

    def broadcast(self, x: Tensor, *, source: int, operation: str) -> None:
        options = BroadcastOptions()
        options.rootRank = source
        self._order(self._backend.broadcast([x], options), operation=operation)

    def recv(self, x: Tensor, *, source: int, operation: str) -> None:
        self._order(self._backend.recv([x], source, 0), operation=operation)

    def isend(self, x: Tensor, *, to: int, operation: str) -> None:
        """Unlike the others this orders nothing: later kernels here need not wait for the peer.

        The caller keeps `x` unchanged until the peer has answered.
        """
        self._watchdog.watch(self._backend.send([x], to, 0), operation=operation)

    def abort(self) -> None:
        self._end()

    def _order(self, work: Work, *, operation: str) -> None:
        work.wait()
        self._watchdog.watch(work, operation=operation)

    def _give_up(self, operation: str) -> None:
        logger.error("nccl work is late, aborting: operation=%s", operation)
        self._lost = operation
        self._end()


class _NcclExchange:
    """The moves of one sum, under its name."""

    def __init__(self, plane: NcclPlane, operation: str) -> None:
        self._plane = plane
        self._operation = operation

    def gathered(self, x_N: Tensor) -> Tensor:
        return self._plane.all_gather(x_N, operation=self._operation)

    def swapped(self, x_GW: Tensor) -> Tensor:
        return self._plane.all_to_all(x_GW, operation=self._operation)


def _end(watchdog: Watchdog, backend: CollectiveBackend) -> None:
    watchdog.stop()
    backend.abort()
