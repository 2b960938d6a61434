"""Words of memory that other threads or processes change, sleep until they do, and clocks."""

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once, get_or_insert_function
from numba.extending import intrinsic

from eesd_dist.transport.sum_layout import FUTEX_CALLS

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_TIMESPEC = ir.ArrayType(_I64, 2)
_FUTEX = FUTEX_CALLS.get(platform.machine(), 0) if platform.system() == "Linux" else 0
"""0: threads do not sleep here, they offer their cores."""
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_REAL_TIME, _MONOTONIC = 0, 1
_NS_PER_S = 1_000_000_000


@intrinsic
def word_at(typing: Any, address: Any) -> Any:
    """Returns the int64 at an address as other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def add_to_word(typing: Any, address: Any, x: Any) -> Any:
    """Adds x to the int64 at an address; returns the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def sleep_at(typing: Any, address: Any, value: Any, limit_ns: Any) -> Any:
    """Sleeps until `wake` is called with this address, unless the int64 there is not `value` any
    more; `limit_ns` nanoseconds at most, less than a second. May return earlier."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        time = alloca_once(builder, _TIMESPEC)
        builder.store(ir.Constant(_I64, 0), _field(builder, time, 0))
        builder.store(args[2], _field(builder, time, 1))
        at = builder.ptrtoint(time, _I64)
        # The low half of a word comes first on the machines that have a number for this call.
        low = builder.and_(args[1], ir.Constant(_I64, 0xFFFFFFFF))
        _system_call(builder, args[0], ir.Constant(_I64, _WAIT), low, at)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


@intrinsic
def wake(typing: Any, address: Any) -> Any:
    """Wakes all threads of all processes that sleep at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        everyone = ir.Constant(_I64, _ALL)
        _system_call(builder, args[0], ir.Constant(_I64, _WAKE), everyone, ir.Constant(_I64, 0))
        return context.get_dummy_value()

    return types.none(types.int64), generate


@intrinsic
def monotonic_ns(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _clock(builder, _MONOTONIC)

    return types.int64(), generate


@intrinsic
def unix_ns(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _clock(builder, _REAL_TIME)

    return types.int64(), generate


@intrinsic
def yield_core(typing: Any) -> Any:
    """Gives the core to another thread that wants it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _offer_core(builder)
        return context.get_dummy_value()

    return types.none(), generate


def _offer_core(builder: Any) -> None:
    kind = ir.FunctionType(_I32, [])
    builder.call(get_or_insert_function(builder.module, kind, "sched_yield"), [])


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def _field(builder: Any, time: Any, at: int) -> Any:
    zero = ir.Constant(_I32, 0)
    return builder.gep(time, [zero, ir.Constant(_I32, at)])


def _system_call(builder: Any, address: Any, operation: Any, value: Any, time: Any) -> None:
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    if not _FUTEX:
        return _offer_core(builder)
    function = get_or_insert_function(builder.module, kind, "syscall")
    zero = ir.Constant(_I64, 0)
    builder.call(function, [ir.Constant(_I64, _FUTEX), address, operation, value, time, zero, zero])


def _clock(builder: Any, clock: int) -> Any:
    time = alloca_once(builder, _TIMESPEC)
    kind = ir.FunctionType(_I32, [_I32, _TIMESPEC.as_pointer()])
    function = get_or_insert_function(builder.module, kind, "clock_gettime")
    builder.call(function, [ir.Constant(_I32, clock), time])
    seconds = builder.load(_field(builder, time, 0))
    nanoseconds = builder.load(_field(builder, time, 1))
    return builder.add(builder.mul(seconds, ir.Constant(_I64, _NS_PER_S)), nanoseconds)
