"""Layout of the memory through which ranks of one host sum, as kernels and the group read it.

Every rank has memory that all of them have mapped: words, each on a cache line of its own, then two
slots that it fills by turns. A rank that fills a slot for turn t has seen all others arrive at turn
t - 1, so that none still reads what the slot held at turn t - 2.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
"""Numbers of the system call by which a thread sleeps until memory changes, by machine."""

# Offsets of a rank's words, in bytes.
ARRIVED = 0
"""The number of turns for which its slot has been filled."""
ABORTED = 64
"""1: the rank has left; no rank waits any more."""
SLEEPERS = 128
"""The number of threads that sleep until `ARRIVED` changes."""
MOST_RANKS = 16
"""Ranks that sum in memory; more of them sum by messages."""
SLOTS = 4096
SLOT_BYTES = 256 * 1024
MEMORY_BYTES = SLOTS + 2 * SLOT_BYTES

# Places in `SumsCall.state`, the words of one rank that no other rank sees.
TURN, NUM_SUMS, SUM_BYTES, WAIT_NS, CONTRIBUTED_NS, LOST, REASON, STOPPED = range(8)
"""The last turn; sums, their bytes and the time of waits, all since they were counted; the Unix
time of the last contribution; the rank that was lost, plus 1, and why; 1: this rank has left."""
GONE = 8
"""Place of rank 0's word, and so on: 1: its connection has ended."""
LATE, LEFT, DEAD = range(1, 4)
"""Reasons: no answer in time, a rank has left, the connection to the rank has ended."""


# Shapes: G ranks.
class SumsCall(NamedTuple):
    """Arguments of a compiled call that sums over ranks."""

    rank: int
    size: int
    """1: nothing is summed."""
    bases_G: npt.NDArray[np.int64]
    """Addresses of the ranks' memory."""
    state: npt.NDArray[np.int64]
    timeout_ns: int


def new_state(size: int) -> npt.NDArray[np.int64]:
    return np.zeros(GONE + size, np.int64)


NO_SUMS = SumsCall(0, 1, np.zeros(1, np.int64), new_state(1), 0)
"""Call of one rank, or of a group that sums between two calls."""
