"""Hosts on one machine: network namespaces with separate addresses, created and removed here.

    python -m tests.support.hosts up [--hosts 3] [--prefix eesd] [--subnet 10.77.1]
    python -m tests.support.hosts down [--prefix eesd]
    python -m tests.support.hosts exact [--hosts 3] [options of `eesd bench exact`]
    python -m tests.support.hosts chaos [--hosts 3] [options of `eesd bench chaos`]
    python -m tests.support.hosts cut|mend [--prefix eesd] ADDRESS

A hub namespace holds a bridge. Each host is a namespace with one port on the bridge. The namespace
of this machine is connected to it too, so that ordinary clients reach the hosts; the rest of the
network is not changed. Processes on a host share pids and files with the machine; only their
network is separate. `tests.support.ray_hosts` runs Ray on the hosts.

Requires Linux, root and iproute2; `can_make_hosts` returns what is missing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

_NAMES = Path("/etc/netns")
"""`ip netns exec` mounts the files in the folder of the namespace over those of /etc."""
_FIRST_ADDRESS = 10
_LONGEST_PREFIX = 8
_GONE_WITHIN_S = 10.0
_POLL_S = 0.05


class HostsError(Exception):
    """Hosts cannot be created or changed; the message contains the failed command and its error."""


def can_make_hosts() -> str | None:
    """Returns None if hosts can be made, else the reason."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if shutil.which("ip") is None:
        return "there is no `ip` command: install iproute2"
    if os.geteuid() != 0:
        return f"network namespaces are root's, and this is user {os.geteuid()}"
    probe = f"eesdprobe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "bridge0", "type", "bridge")
            _ip("-n", probe, "link", "add", "name", "one", "type", "veth", "peer", "two")
        finally:
            _ip("netns", "del", probe)
    except HostsError as error:
        return f"this kernel or container does not let us: {error}"
    return None


class Hosts:
    """Creates hosts on entry and removes them on exit.

    First removes what an earlier run has left under the same prefix, including processes.
    """

    def __init__(
        self, num_hosts: int = 3, *, prefix: str = "eesd", subnet: str = "10.77.1"
    ) -> None:
        if not re.fullmatch(rf"[a-z]{{1,{_LONGEST_PREFIX}}}", prefix):
            raise ValueError(f"prefix {prefix!r}: 1 to {_LONGEST_PREFIX} small letters, no more")
        self.num_hosts = num_hosts
        self.prefix = prefix
        self._subnet = subnet
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def folder(self) -> Path:
        """Returns the folder for files of programs on the hosts; the path is short, for sockets."""
        return _folder(self.prefix)

    def name(self, host: int) -> str:
        """Returns the name of the namespace."""
        return f"{self.prefix}{host}"

    def address(self, host: int) -> str:
        return f"{self._subnet}.{_FIRST_ADDRESS + host}"

    def up(self) -> None:
        down(self.prefix)
        self.folder.mkdir(mode=0o700)
        hub = _hub(self.prefix)
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for host in range(self.num_hosts):
            self._add(host)
        leg = _leg(self.prefix)
        _ip("link", "add", leg, "type", "veth", "peer", "name", "leg", "netns", hub)
        self._plug("leg")
        _ip("addr", "add", f"{self._subnet}.1/24", "dev", leg)
        _ip("link", "set", leg, "up")

    def down(self) -> None:
        down(self.prefix)
        for process in self._processes:
            process.wait(_GONE_WITHIN_S)
        self._processes.clear()

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def run(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        output: IO[str] | int | None = None,
    ) -> "subprocess.Popen[str]":
        """Starts a program on a host; the process is the program itself. It ends with the hosts."""
        return self._run(self.name(host), argv, env, output)

    def _run(
        self,
        namespace: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        output: IO[str] | int | None,
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *argv],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def cut(self, host: int) -> None:
        """Drops all packets from and to this host, without an error on either side."""
        _ip("-n", _hub(self.prefix), "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", _hub(self.prefix), "link", "set", f"port{host}", "up")

    def block(self, host: int, port: int) -> None:
        """Drops new connections from other hosts to this TCP port, as a firewall does: silently.

        Works without nftables, by a routing rule in front of that for local addresses.
        """
        name = self.name(host)
        _ip("-n", name, "rule", "add", "pref", "10", "lookup", "local")
        _ip("-n", name, "rule", "del", "pref", "0")
        _ip(
            *("-n", name, "rule", "add", "pref", "5", "iif", "eth0"),
            *("ipproto", "tcp", "dport", str(port), "blackhole"),
        )

    def unblock(self, host: int) -> None:
        name = self.name(host)
        _ip("-n", name, "rule", "del", "pref", "5")
        _ip("-n", name, "rule", "add", "pref", "0", "lookup", "local")
        _ip("-n", name, "rule", "del", "pref", "10")

    def divert(self, host: int) -> tuple[str, str]:
        """Unplugs the host from the bridge. Returns two interfaces of the hub, of the host and of
        the bridge: a program in the hub has to carry frames between them (`run_in_hub`)."""
        hub, port, gap = _hub(self.prefix), f"port{host}", f"gap{host}"
        _ip("-n", hub, "link", "add", gap, "type", "veth", "peer", "name", f"{gap}b")
        self._plug(f"{gap}b")
        _ip("-n", hub, "link", "set", gap, "up")
        _ip("-n", hub, "link", "set", port, "nomaster")
        return port, gap

    def undo_divert(self, host: int) -> None:
        _ip("-n", _hub(self.prefix), "link", "del", f"gap{host}")
        self._plug(f"port{host}")

    def run_in_hub(self, argv: Sequence[str]) -> "subprocess.Popen[str]":
        """Starts a program between the hosts. It ends with them."""
        return self._run(_hub(self.prefix), argv, None, None)

    def pids(self, host: int) -> set[int]:
        return _pids(self.name(host))

    def host_of(self, pid: int) -> int:
        """Returns the host on which a process runs."""
        for host in range(self.num_hosts):
            if pid in self.pids(host):
                return host
        raise HostsError(f"process {pid} runs on none of the {self.num_hosts} hosts")

    def kill_host(self, host: int) -> None:
        """Kills every process on the host. Connections of their peers are reset; call `cut` first
        to make the host disappear silently."""
        _kill_all(self.name(host))

    def _add(self, host: int) -> None:
        name, hub = self.name(host), _hub(self.prefix)
        files = _NAMES / name
        files.mkdir(parents=True)
        # Names are resolved by this file only: otherwise each look-up of a peer's address waits for
        # an unreachable name server.
        lines = [f"{self.address(host)} {self.name(host)}" for host in range(self.num_hosts)]
        (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (files / "resolv.conf").write_text("")
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        port = f"port{host}"
        _ip(
            "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", hub
        )
        self._plug(port)
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        # A route to nowhere, for programs that look for their outward address.
        _ip("-n", name, "route", "add", "default", "via", f"{self._subnet}.254")

    def _plug(self, port: str) -> None:
        hub = _hub(self.prefix)
        _ip("-n", hub, "link", "set", port, "master", "bridge0")
        _ip("-n", hub, "link", "set", port, "up")


def down(prefix: str) -> None:
    """Removes everything that `up` has created under this prefix; can be repeated."""
    for name in _namespaces(prefix):
        _kill_all(name)
        _ip("netns", "del", name)
    for folder in _NAMES.glob(f"{prefix}*"):
        if _is_of(prefix, folder.name):
            shutil.rmtree(folder)
    if Path("/sys/class/net", _leg(prefix)).exists():
        _drop_leg(prefix)
    if _folder(prefix).exists():
        shutil.rmtree(_folder(prefix))


def _drop_leg(prefix: str) -> None:
    try:
        _ip("link", "del", _leg(prefix))
    except HostsError:
        # The kernel removes it with the hub, after some time.
        if Path("/sys/class/net", _leg(prefix)).exists():
            raise


def _kill_all(namespace: str) -> None:
    deadline = time.monotonic() + _GONE_WITHIN_S
    while pids := _pids(namespace):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended already
                continue
        if time.monotonic() > deadline:
            raise HostsError(f"{namespace}: processes {sorted(pids)} do not end")
        time.sleep(_POLL_S)


def _namespaces(prefix: str) -> list[str]:
    folder = Path("/run/netns")
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return [name for name in names if _is_of(prefix, name)]


def _is_of(prefix: str, name: str) -> bool:
    return re.fullmatch(rf"{re.escape(prefix)}(hub|\d+)", name) is not None


def _hub(prefix: str) -> str:
    return f"{prefix}hub"


def _leg(prefix: str) -> str:
    return f"{prefix}leg"


def _folder(prefix: str) -> Path:
    return Path(f"/tmp/{prefix}hosts")


def _pids(namespace: str) -> set[int]:
    return {int(line) for line in _ip("netns", "pids", namespace).split()}


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise HostsError(f"`ip {' '.join(words)}`: {reason}")
    return done.stdout


def main(argv: Sequence[str]) -> int:
    options, words = _parser().parse_known_args(argv)
    if words and options.command not in ("chaos", "exact"):
        sys.stderr.write(f"unknown words: {' '.join(words)}\n")
        return 2
    if options.command in ("cut", "mend"):
        hosts = Hosts(prefix=options.prefix)
        host = int(options.address.rpartition(".")[2]) - _FIRST_ADDRESS
        hosts.cut(host) if options.command == "cut" else hosts.mend(host)
        return 0
    reason = can_make_hosts()
    if reason is not None:
        sys.stderr.write(f"no hosts: {reason}\n")
        return 2
    if options.command == "down":
        down(options.prefix)
        return 0
    hosts = Hosts(options.hosts, prefix=options.prefix, subnet=options.subnet)
    if options.command == "up":
        hosts.up()
        for host in range(hosts.num_hosts):
            sys.stdout.write(f"{hosts.address(host)}: ip netns exec {hosts.name(host)} COMMAND\n")
        return 0
    from tests.support.ray_hosts import bench_chaos, bench_exact

    # As after Ctrl-C, the hosts are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return (bench_chaos if options.command == "chaos" else bench_exact)(hosts, words)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--prefix", default="eesd", help="what names of namespaces begin with")
    making = argparse.ArgumentParser(add_help=False)
    making.add_argument("--hosts", type=int, default=3)
    making.add_argument("--subnet", default="10.77.1", help="its first three numbers")
    parser = argparse.ArgumentParser(prog="python -m tests.support.hosts")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", parents=[common, making], help="make the hosts")
    commands.add_parser("down", parents=[common], help="remove them, and all that runs there")
    commands.add_parser(
        "chaos", parents=[common, making], help="`eesd bench chaos` across hosts, links included"
    )
    for command, what in (("cut", "cut a host off"), ("mend", "give it its link back")):
        commands.add_parser(command, parents=[common], help=what).add_argument("address")
    commands.add_parser("exact", parents=[common, making], help="`eesd bench exact` across hosts")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
