"""The few calls of the CUDA driver that torch does not offer: memory that other processes map."""

import ctypes
from ctypes import (
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from functools import cache
from typing import NamedTuple

_DEVICE = 1
_PINNED = 1
_FILE_DESCRIPTOR = 1
_READ_WRITE = 3
_RECOMMENDED = 1


class DriverError(RuntimeError):
    """A call of the driver has failed, or this machine has no driver."""


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", c_ubyte),
        ("direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class Mapping(NamedTuple):
    """Addresses of a process that lead to memory of a GPU."""

    address: int
    size: int

    def free(self) -> None:
        """Gives the addresses back; nothing on the device may use them any more. The memory lives
        until no process has it."""
        _call("cuMemUnmap", c_ulonglong(self.address), c_size_t(self.size))
        _call("cuMemAddressFree", c_ulonglong(self.address), c_size_t(self.size))


def allocate(num_bytes: int, *, device: int) -> tuple[Mapping, int]:
    """Returns zeroed memory of at least so many bytes, and a file descriptor by which another
    process maps it, to be closed by the caller. Raises DriverError."""
    properties = _Properties(_PINNED, _FILE_DESCRIPTOR, _Location(_DEVICE, device))
    step = c_size_t()
    _call("cuMemGetAllocationGranularity", byref(step), byref(properties), c_int(_RECOMMENDED))
    size = -(-num_bytes // step.value) * step.value
    handle = c_ulonglong()
    _call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_ulonglong(0))
    try:
        mapping = _mapped(handle, size, device=device)
        _call("cuMemsetD8_v2", c_ulonglong(mapping.address), c_ubyte(0), c_size_t(size))
        descriptor = c_int(-1)
        try:
            _call(
                "cuMemExportToShareableHandle",
                byref(descriptor), handle, c_int(_FILE_DESCRIPTOR), c_ulonglong(0),
            )  # fmt: skip
        except DriverError:
            mapping.free()
            raise
    finally:
        _call("cuMemRelease", handle)  # the mapping keeps the memory
    return mapping, descriptor.value


def map_peer(descriptor: int, size: int, *, device: int) -> Mapping:
    """Maps memory of another process for this device. Raises DriverError."""
    handle = c_ulonglong()
    _call(
        "cuMemImportFromShareableHandle",
        byref(handle), c_void_p(descriptor), c_int(_FILE_DESCRIPTOR),
    )  # fmt: skip
    try:
        return _mapped(handle, size, device=device)
    finally:
        _call("cuMemRelease", handle)


def _mapped(handle: c_ulonglong, size: int, *, device: int) -> Mapping:
    address = c_ulonglong()
    length = c_size_t(size)
    zero = c_ulonglong(0)
    _call("cuMemAddressReserve", byref(address), length, c_size_t(0), zero, zero)
    try:
        _call("cuMemMap", address, length, c_size_t(0), handle, zero)
    except DriverError:
        _call("cuMemAddressFree", address, length)
        raise
    mapping = Mapping(address.value, size)
    try:
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        _call("cuMemSetAccess", address, length, byref(access), c_size_t(1))
    except DriverError:
        mapping.free()
        raise
    return mapping


def _call(name: str, *arguments: object) -> None:
    driver = _driver()
    status: int = getattr(driver, name)(*arguments)
    if status:
        text = c_char_p()
        driver.cuGetErrorName(c_uint(status), byref(text))
        raise DriverError(f"{name}: {(text.value or b'').decode() or status}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from error
