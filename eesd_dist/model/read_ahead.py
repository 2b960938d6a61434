"""How far a load reads ahead of what it packs. Imports no torch: the planner asks it."""

from collections.abc import Sequence

NUM_READERS = 4
READ_AHEAD_BYTES = 2**30


def num_read_ahead(sizes: Sequence[int]) -> int:
    """Returns how many of the next pieces, of these sizes in bytes, may be read ahead: at most one
    for each reader, and no more than `READ_AHEAD_BYTES` unless that is less than one piece."""
    num, size_bytes = 0, 0
    for size in sizes[:NUM_READERS]:
        size_bytes += size
        if num and size_bytes > READ_AHEAD_BYTES:
            break
        num += 1
    return num
