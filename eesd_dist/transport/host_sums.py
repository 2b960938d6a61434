"""Sums over the ranks of one host inside of compiled calls, through memory that all have mapped.

A rank writes its part into its own memory, says so, and adds up the parts of all ranks in their
order (`backends.cpu.kernels.rank_sums`): microseconds, where a message takes a hundred. This module
owns the memory and ends the waits: when the group is aborted here or by another rank, when the
connection to a rank ends, and at a deadline.
"""

import ctypes
import mmap
import os
import platform
from functools import cache
from typing import NamedTuple

import numpy as np

from eesd_dist.transport.counts import Tally
from eesd_dist.transport.peer_memory import Joining, Mapping, share_memory
from eesd_dist.transport.sum_layout import (
    ABORTED,
    ARRIVED,
    CONTRIBUTED_NS,
    DEAD,
    FUTEX_CALLS,
    GONE,
    LEFT,
    LOST,
    MEMORY_BYTES,
    NUM_SUMS,
    REASON,
    STOPPED,
    SUM_BYTES,
    WAIT_NS,
    SumsCall,
    new_state,
)

_WAKE, _ALL = 1, 2**31 - 1


class LostRank(NamedTuple):
    """A rank that did not send its part of a sum, and why."""

    rank: int
    reason: str


class HostMapping:
    """Implements `peer_memory.Mapping` by memory of a host."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        self.address: int = self._bytes.ctypes.data

    def free(self) -> None:
        self._bytes = self._bytes[:0].copy()


_retired: list[Mapping] = []


class HostMemory:
    """Implements `peer_memory.MemorySource` by memory without a name: nothing is left behind."""

    refusals: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        self.retired = _retired

    def allocate(self, num_bytes: int) -> tuple[Mapping, int]:
        if not has_futex():
            raise OSError("the ranks cannot wake each other on this machine")
        descriptor = os.memfd_create("eesd-sums")
        try:
            os.truncate(descriptor, num_bytes)
            return HostMapping(descriptor, num_bytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def map_peer(self, descriptor: int, size: int) -> Mapping:
        return HostMapping(descriptor, size)

    def synchronize(self) -> None:
        return


def join_host_sums(joining: Joining, *, node: str, timeout_s: float) -> "HostSums | str":
    """Returns the sums, or the reason why these ranks have none: the same on every rank. Raises
    PeerLost for a missing rank."""
    memory = share_memory(MEMORY_BYTES, source=HostMemory(), node=node, joining=joining)
    if isinstance(memory, str):
        return memory
    return HostSums(memory, memory.addresses, rank=joining.rank, timeout_s=timeout_s)


class HostSums:
    """Sums of one rank. Every rank makes the same calls in the same order."""

    def __init__(
        self, owner: object, addresses: tuple[int, ...], *, rank: int, timeout_s: float
    ) -> None:
        """`owner`: keeps the memory at these addresses, MEMORY_BYTES of zeros a rank."""
        self._owner = owner
        self.call = SumsCall(
            rank=rank,
            size=len(addresses),
            bases_G=np.array(addresses, np.int64),
            state=new_state(len(addresses)),
            timeout_ns=int(timeout_s * 1e9),
        )
        """Arguments of compiled calls. This object must outlive the call."""

    def count(self, tally: Tally) -> None:
        """Adds to the tally what was summed since the last time."""
        state, others = self.call.state, self.call.size - 1
        tally.number += int(state[NUM_SUMS])
        tally.sent_bytes += int(state[SUM_BYTES]) * others
        tally.received_bytes += int(state[SUM_BYTES]) * others
        tally.wait_s += int(state[WAIT_NS]) / 1e9
        state[NUM_SUMS] = state[SUM_BYTES] = state[WAIT_NS] = 0

    @property
    def contributed_unix_s(self) -> float:
        """Time of this rank's last contribution to a sum."""
        return int(self.call.state[CONTRIBUTED_NS]) / 1e9

    @property
    def lost(self) -> LostRank | None:
        """The rank that sent no part; results are garbage then, and no later sum waits."""
        state = self.call.state
        if not state[LOST]:
            return None
        reasons = {LEFT: "the group was aborted", DEAD: "its connection is gone"}
        timeout = f"no answer within {self.call.timeout_ns / 1e9:g} s"
        return LostRank(int(state[LOST]) - 1, reasons.get(int(state[REASON]), timeout))

    def end_waits_for(self, rank: int) -> None:
        """Ends the waits for a rank that will not come. From any thread."""
        self.call.state[GONE + rank] = 1
        self._wake(rank)

    def abort(self) -> None:
        """Ends all waits, here and at the other ranks. From any thread."""
        self.call.state[STOPPED] = 1
        own = int(self.call.bases_G[self.call.rank])
        ctypes.c_int64.from_address(own + ABORTED).value = 1
        for rank in range(self.call.size):
            self._wake(rank)

    def _wake(self, rank: int) -> None:
        address = int(self.call.bases_G[rank]) + ARRIVED
        _system_call()(FUTEX_CALLS[platform.machine()], address, _WAKE, _ALL, None, None, 0)


def has_futex() -> bool:
    """Returns whether threads of different processes can wake each other here."""
    return platform.system() == "Linux" and platform.machine() in FUTEX_CALLS


@cache
def _system_call() -> "ctypes._NamedFuncPointer":
    call = ctypes.CDLL(None).syscall
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return call
