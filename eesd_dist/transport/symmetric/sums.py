"""Sums and gathers over the ranks of one node, each in one kernel that a CUDA graph can hold."""

import torch
from torch import Tensor

from eesd_dist.devices import HOST
from eesd_dist.transport.counts import WHOLE_BYTES
from eesd_dist.transport.peer_memory import Joining, Mapping, PeerMemory, share_memory
from eesd_dist.transport.rank_sums import SUMMED_IN_FLOAT32
from eesd_dist.transport.symmetric import driver
from eesd_dist.transport.symmetric.kernel import (
    DATA,
    NUM_WARPS,
    PROGRAMS,
    gather_kernel,
    gathered_sum_kernel,
    sum_kernel,
)

CAPACITY = 4 << 20
"""Bytes that a launch sums; a larger tensor is summed in several launches."""
_LARGEST = 8 * CAPACITY
"""A prompt's tensors are larger: they keep the copy engines' or the network's way."""
_TILE_BYTES = 4096
MEMORY_BYTES = DATA + 4 * CAPACITY
"""Memory of a rank."""
_retired: list[Mapping] = []
"""Mappings without a user. They are not freed at once: the garbage collector may run during a
capture, and kernels that were queued earlier may run."""


class GpuMemory:
    """Implements `peer_memory.MemorySource` by the driver of a GPU."""

    refusals: tuple[type[Exception], ...] = (driver.DriverError, OSError)

    def __init__(self, device: torch.device) -> None:
        self.retired = _retired
        self._device = device

    def allocate(self, num_bytes: int) -> tuple[Mapping, int]:
        return driver.allocate(num_bytes, device=self._device.index)

    def map_peer(self, descriptor: int, size: int) -> Mapping:
        return driver.map_peer(descriptor, size, device=self._device.index)

    def synchronize(self) -> None:
        torch.cuda.set_device(self._device)  # the driver's calls need its context
        torch.cuda.synchronize(self._device)


def join_symmetric(joining: Joining, *, device: torch.device, node: str) -> "SymmetricSums | str":
    """Returns the sums over this rank's node, or the reason why these ranks have none: the same on
    every rank. Raises PeerLost for a missing rank."""
    source = GpuMemory(device)
    memory = share_memory(MEMORY_BYTES, source=source, node=node, joining=joining, over_nodes=True)
    if isinstance(memory, str):
        return memory
    return SymmetricSums(memory, rank=joining.rank % len(memory.addresses), device=device)


def sum_of_gathered(x_GN: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum [N] of every rank's numbers with the bits of `pairwise_sum`, rounded to this
    type."""
    size, num = x_GN.shape
    total_N = x_GN.new_empty(num, dtype=dtype)
    block = _TILE_BYTES // x_GN.element_size()
    gathered_sum_kernel[(-(-num // block),)](
        x_GN, total_N, num, SIZE=size, BLOCK=block, num_warps=4
    )
    return total_N


class SymmetricSums:
    """Sums and gathers of one rank of a node. Every rank makes the same calls in the same order, on
    streams that are ordered; a graph that holds some is replayed on every rank."""

    def __init__(
        self,
        memory: PeerMemory,
        *,
        rank: int,
        device: torch.device,
        capacity: int = CAPACITY,
    ) -> None:
        """`capacity`: bytes of a launch; `memory` has four times as many after DATA."""
        self._memory = memory
        self._rank, self.size = rank, len(memory.addresses)
        self._capacity = capacity
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=device != HOST)
        words = [*memory.addresses, self._abort.data_ptr()]
        self._bases = torch.tensor(words, dtype=torch.int64, device=device)
        self._counts = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device=device)

    def fits(self, x: Tensor) -> bool:
        """Returns whether `sum` takes this tensor."""
        return x.dtype in SUMMED_IN_FLOAT32 and 0 < x.nbytes <= _LARGEST

    def fits_gather(self, x: Tensor) -> bool:
        """Returns whether `gather` takes this tensor."""
        return 0 < x.nbytes <= self._capacity

    def sum(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the sum of all ranks' x, with the bits of `pairwise_sum`; `dtype`: float32 for
        one that is not rounded."""
        x = x.contiguous()
        total = torch.empty_like(x, dtype=dtype)
        width = self._capacity // x.element_size()
        blocks = (torch.split(numbers.view(-1), width) for numbers in (x, total))
        for block, block_total in zip(*blocks, strict=True):
            sum_kernel[(PROGRAMS,)](
                block,
                block_total,
                self._bases,
                self._counts,
                block.numel(),
                IN_SHARES=self.size > 2 and block.nbytes > WHOLE_BYTES and dtype is None,
                **self._constants(x),
            )
        return total

    def gather(self, x: Tensor) -> Tensor:
        """Returns every rank's x, [G, *x.shape]."""
        x = x.contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        gather_kernel[(PROGRAMS,)](
            x, gathered, self._bases, self._counts, x.numel(), **self._constants(x)
        )
        return gathered

    def abort(self) -> None:
        """Ends the waits of this rank's kernels; their results are garbage then. From any thread;
        makes no call of the driver, which may be blocked by what is to be ended."""
        self._abort.fill_(1)

    def _constants(self, x: Tensor) -> dict[str, int]:
        return {
            "RANK": self._rank,
            "SIZE": self.size,
            "PROGRAMS": PROGRAMS,
            "DATA": DATA,
            "CAPACITY": self._capacity,
            "TILE": _TILE_BYTES // x.element_size(),
            "num_warps": NUM_WARPS,
        }
