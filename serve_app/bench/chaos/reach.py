"""Access to processes and links, here and on other hosts.

Processes of other hosts are reached through a Ray task on their node, or through a command that the
operator gives. Connections are cut on this machine alone, and on Linux.
"""

import asyncio
import ctypes
import errno
import ipaddress
import os
import shlex
import signal
import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.workers.messages import ProcessInfo

_PROC = Path("/proc")
_ESTABLISHED = "01"
_PIDFD_GETFD = 438
"""The system call's number, the same on every architecture since Linux 5.6."""
_REACH_TIMEOUT_S = 15.0

_DEAF_BYTES = 2**30
"""More than ever arrives: the kernel lowers it to what a socket may buffer, some megabytes."""

Connection = tuple[tuple[str, int], tuple[str, int]]
"""Local end, remote end."""


class Signals(Protocol):
    """A way to send a signal to a process, wherever it runs."""

    async def send(self, number: signal.Signals, *, to: ProcessInfo) -> bool:
        """False when there is no such process any more."""
        ...


class SignalsOverRay:
    """Directly on this node, through a task on the others."""

    async def send(self, number: signal.Signals, *, to: ProcessInfo) -> bool:
        if to.node_id == ray.get_runtime_context().get_node_id():
            return _send(to.pid, number)
        placement = NodeAffinitySchedulingStrategy(to.node_id, soft=False)
        task = ray.remote(_send).options(num_cpus=0, scheduling_strategy=placement, max_retries=0)
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                return bool(await task.remote(to.pid, number))
        except (TimeoutError, RayError) as error:
            raise EngineError(
                f"cannot reach pid {to.pid} on {to.host} over Ray: {error!r}; give --kill"
            ) from error


@dataclass(frozen=True, slots=True)
class SignalsByCommand:
    """Through a command with `{host}`, `{pid}` and `{signal}`, e.g. over ssh."""

    template: str

    async def send(self, number: signal.Signals, *, to: ProcessInfo) -> bool:
        await run_command(self.template, host=to.host, pid=to.pid, signal=number.name[3:])
        return True


async def run_command(template: str, **values: object) -> None:
    """Runs a command. Raises EngineError with its standard error when it fails."""
    try:
        words = [word.format(**values) for word in shlex.split(template)]
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join(f"{{{name}}}" for name in values)
        raise ConfigError(f"{template}: {error!r}; shell words may name {names}") from error
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    if process.returncode:
        raise EngineError(
            f"{shlex.join(words)} ended with {process.returncode}: {stderr.decode().strip()[-300:]}"
        )


def sever(pid: int, other_pid: int) -> int:
    """Shuts every established TCP connection between two processes; returns how many there were.

    The sockets are duplicated from the first process by pidfd_getfd(2), which requires the rights
    of a debugger: those of root or of an ancestor, or as kernel.yama.ptrace_scope says.
    """
    shared = _shared(pid, other_pid)
    for fd in shared:
        with closing(_taken(pid, fd)) as sock:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                if error.errno != errno.ENOTCONN:  # closed by its owner in between
                    raise
    return len(shared)


def deafen(pid: int, other_pid: int) -> int:
    """Makes a process read nothing any more that another one sends over the connections that they
    have now; returns how many there are.

    The connections stay up and the kernel acknowledges what arrives, some megabytes for each, but
    does not report it as readable. Needs the rights that `sever` needs.
    """
    shared = _shared(pid, other_pid)
    for fd in shared:
        with closing(_taken(pid, fd)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _DEAF_BYTES)
    return len(shared)


def _shared(pid: int, other_pid: int) -> list[int]:
    """Returns the first process's descriptors of its connections with the other one."""
    theirs = {(remote_end, local_end) for local_end, remote_end in _connections(other_pid)}
    return [fd for ends, fd in _connections(pid).items() if ends in theirs]


def _taken(pid: int, fd: int) -> socket.socket:
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"pidfd_getfd of fd {fd} of pid {pid}: {os.strerror(number)}")
    return socket.socket(fileno=copy)


def _connections(pid: int) -> dict[Connection, int]:
    """A process' established TCP connections, and its file descriptor of each."""
    fds = _sockets(pid)
    connections: dict[Connection, int] = {}
    for table in ("tcp", "tcp6"):
        for line in (_PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
            _, local_end, remote_end, state, *columns = line.split()
            inode = columns[5]
            if state == _ESTABLISHED and inode in fds:
                connections[_end(local_end), _end(remote_end)] = fds[inode]
    return connections


def _sockets(pid: int) -> dict[str, int]:
    """Inode to file descriptor."""
    descriptors: dict[str, int] = {}
    for entry in (_PROC / str(pid) / "fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # closed since it was listed
            continue
        if target.startswith("socket:["):
            descriptors[target[len("socket:[") : -1]] = int(entry.name)
    return descriptors


def _end(text: str) -> tuple[str, int]:
    """The kernel prints addresses as hexadecimal words in the machine's own byte order."""
    digits, port = text.split(":")
    raw = b"".join(
        int(digits[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(digits), 8)
    )
    if len(raw) == 4:
        return str(ipaddress.IPv4Address(raw)), int(port, 16)
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address), int(port, 16)


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
