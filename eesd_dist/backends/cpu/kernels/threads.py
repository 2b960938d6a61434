"""Waiting between the threads of one compiled call.

The threads of a call wait for each other between its steps, microseconds apart: too often for the
system's locks. A thread that finds the others late gives its core away, and sleeps in the end.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from eesd_dist.backends.cpu.kernels.lanes import address_of
from eesd_dist.backends.cpu.kernels.words import sleep_at, wake, yield_core

_I64 = ir.IntType(64)
_SPINS = 4000
"""Looks at the counter before the core is given away: some microseconds."""
_GENERATION = 16
"""Place of the second counter, on a cache line of its own."""
_SLEEPERS = 24
_YIELDS = 500
"""Offers of the core before a thread sleeps."""
_LONGEST_SLEEP_NS = 20_000_000

NUM_COUNTERS = 32


@intrinsic
def _added(typing: Any, counters: Any, at: Any, x: Any) -> Any:
    """Adds x to counters[at]; returns the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(counters, types.intp, types.int64), generate


@intrinsic
def _seen(typing: Any, counters: Any, at: Any) -> Any:
    """Returns counters[at] as other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(counters, types.intp), generate


@njit(nogil=True, error_model="numpy")
def wait(counters, num_threads):  # type: ignore[no-untyped-def]
    """Returns when all threads of this call are here. `counters`: int64, zeros before the call."""
    if num_threads == 1:
        return
    generation = _seen(counters, _GENERATION)
    if _added(counters, 0, 1) == num_threads - 1:
        _added(counters, 0, -num_threads)
        _added(counters, _GENERATION, 1)
        if _seen(counters, _SLEEPERS) > 0:
            wake(address_of(counters) + _GENERATION * 8)
        return
    spins = 0
    while _seen(counters, _GENERATION) == generation:
        spins += 1
        if spins > _SPINS + _YIELDS:
            _added(counters, _SLEEPERS, 1)
            sleep_at(address_of(counters) + _GENERATION * 8, generation, _LONGEST_SLEEP_NS)
            _added(counters, _SLEEPERS, -1)
        elif spins > _SPINS:
            yield_core()
