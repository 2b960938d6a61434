"""Hosts that `ray up` reaches over SSH, each with separate processes, home and shared memory.

`tests.support.hosts` separates networks only. Ray's start commands end every Ray process that they
find, so each host here also has its own process namespace, home folder, /tmp and /dev/shm, and an
SSH server as its first process: when that ends, the host is empty.

The user of the hosts is `eesd`, another name of root with another home: an interpreter in the home
of root stays readable. All hosts share one virtual environment, in which the checkout of the host
comes before the packages of the caller; its stamps make `make install-serving` do nothing. They
share the folder of compiled kernels too, as one host that compiles for all of them.

Requires what `tests.support.hosts` requires, and sshd, ssh and rsync.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.hosts import Hosts, HostsError, can_make_hosts

USER = "eesd"
HOME = Path("/home") / USER
CHECKOUT = HOME / "eesd-dist"
KEY = HOME / ".ssh" / "id_ed25519"
REPOSITORY = Path(__file__).parents[2]

_VENV = Path("/home/venv")
_PACKAGES = Path("/home/site-packages")
_CACHE = HOME / ".cache" / "eesd"
_TOOLS = ("sshd", "ssh", "ssh-keygen", "rsync", "unshare", "nsenter", "mount")
_SCRIPTS = ("eesd", "ray", "serve")
_START_S = 20.0
_POLL_S = 0.05

# $1: host name, $2: its home, $3: virtual environment, $4: packages, $5: cache.
_BOOT = f"""
set -e
hostname "$1"
mount -t tmpfs tmpfs /home
mkdir {HOME} {_VENV} {_PACKAGES} -p
mount --bind "$2" {HOME}
mount --bind "$3" {_VENV}
mount --bind "$4" {_PACKAGES}
mkdir -p {_CACHE}
mount --bind "$5" {_CACHE}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount -t tmpfs tmpfs /tmp
chmod 1777 /tmp
exec "$6" -D -e -f {HOME}/.ssh/sshd_config
"""


def can_make_ssh_hosts() -> str | None:
    """Returns None if such hosts can be made, else the reason."""
    missing = [name for name in _TOOLS if _which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: install openssh-server, rsync and util-linux"
    return can_make_hosts()


class SshHosts:
    """Hosts with SSH servers, and one more, the last, without: the machine of the operator.

    The operator has a copy of the checkout at `~/eesd-dist`, as every node has after `ray up`.
    """

    def __init__(self, num_nodes: int, *, prefix: str, subnet: str) -> None:
        self.hosts = Hosts(num_nodes + 1, prefix=prefix, subnet=subnet)
        self.num_nodes = num_nodes
        self.operator = num_nodes
        self._first: dict[int, int] = {}
        """Pid, on this machine, of the SSH server of each host, which has its namespaces."""

    def __enter__(self) -> Self:
        self.hosts.__enter__()
        try:
            self._write_files()
            self.boot(self.operator)
        except BaseException:
            self.hosts.down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hosts.__exit__(kind, error, trace)

    def home(self, host: int) -> Path:
        """Returns the folder that is `~` on a host."""
        return self.hosts.folder / f"home{host}"

    def boot(self, host: int) -> None:
        """Turns a host on; until then nothing on it answers."""
        environment = self.hosts.folder / "venv"
        packages = sysconfig.get_path("purelib")
        sshd = _which("sshd")
        assert sshd is not None, "can_make_ssh_hosts has been asked"
        cache = str(self.hosts.folder / "cache")
        words = [self.hosts.name(host), str(self.home(host)), str(environment), packages, cache]
        separate = ["unshare", "--pid", "--mount-proc", "--mount", "--uts", "--fork"]
        log = self.hosts.folder / f"sshd{host}.log"
        with log.open("w") as output:
            outside = self.hosts.run(
                host,
                [*separate, "--kill-child", "bash", "-c", _BOOT, "boot", *words, sshd],
                output=output,
            )
        self._first[host] = _first_process(outside, log)

    def start(self, host: int, command: str, *, log: Path) -> "subprocess.Popen[str]":
        """Starts a command in the home of a host, with the environment of a login."""
        enter = ["nsenter", "--target", str(self._first[host]), "--all"]
        login = ["env", "-i", *(f"{k}={v}" for k, v in self._login().items()), "bash", "-c"]
        with log.open("w") as output:
            return subprocess.Popen(
                [*enter, *login, f"cd {CHECKOUT} && {command}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def processes(self, host: int) -> dict[int, str]:
        """Returns the command lines of what runs on a host, its SSH server and sessions aside."""
        commands = {}
        for pid in self.hosts.pids(host):
            try:
                process = psutil.Process(pid)
                words = process.cmdline()
                if words and not process.name().startswith(("sshd", "unshare")):
                    commands[pid] = shlex.join(words)
            except psutil.NoSuchProcess:
                continue
        return commands

    def _login(self) -> Mapping[str, str]:
        return {
            "HOME": str(HOME),
            "USER": USER,
            "LOGNAME": USER,
            "LANG": "C.UTF-8",
            "PATH": f"{_VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }

    def _write_files(self) -> None:
        _write_environment(self.hosts.folder / "venv")
        (self.hosts.folder / "cache").mkdir()
        key = self.hosts.folder / "key"
        _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        for host in range(self.hosts.num_hosts):
            self._write_home(host, key)
            # ssh takes the first name of the user id for its home.
            account = f"{USER}:x:0:0::{HOME}:/bin/bash\nroot:x:0:0:root:/root:/bin/bash\n"
            passwd = Path("/etc/netns") / self.hosts.name(host) / "passwd"
            passwd.write_text(account + "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n")
        exclude = [f"--exclude={name}" for name in (".git", ".venv", "build", ".*_cache", "shared")]
        copy = str(self.home(self.operator) / "eesd-dist")
        _run(["rsync", "-a", "--exclude=__pycache__", *exclude, f"{REPOSITORY}/", copy])

    def _write_home(self, host: int, key: Path) -> None:
        home = self.home(host)
        secrets = home / ".ssh"
        secrets.mkdir(parents=True, mode=0o700)
        (home / "eesd-dist").mkdir()
        (home / "eesd-dist" / ".venv").symlink_to(_VENV)
        for name in (".bashrc", ".profile"):
            shutil.copy(Path("/etc/skel") / name, home)
        shutil.copy(key, secrets / KEY.name)
        shutil.copy(key.with_suffix(".pub"), secrets / "authorized_keys")
        lines = {
            "ListenAddress": self.hosts.address(host),
            "HostKey": str(KEY),
            "AuthorizedKeysFile": str(HOME / ".ssh" / "authorized_keys"),
            "PidFile": "none",
            "PermitRootLogin": "prohibit-password",
            "UsePAM": "no",
            "UseDNS": "no",
            "StrictModes": "no",
            "MaxStartups": "100",
        }
        config = "".join(f"{name} {value}\n" for name, value in lines.items())
        (secrets / "sshd_config").write_text(config)


def _write_environment(folder: Path) -> None:
    """Writes a virtual environment for the place `_VENV`, with the caller's packages."""
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "checkout.pth").write_text(f"{CHECKOUT}\n{_PACKAGES}\n")
    for name in _SCRIPTS:
        script = (Path(sys.executable).parent / name).read_text()
        _, _, body = script.partition("\n")
        (folder / "bin" / name).write_text(f"#!{_VENV}/bin/python\n{body}")
        (folder / "bin" / name).chmod(0o755)
    (folder / ".serving").touch()


def _first_process(outside: "subprocess.Popen[str]", log: Path) -> int:
    """Returns the pid of the SSH server below `ip netns exec` and `unshare`, once it listens."""
    deadline = time.monotonic() + _START_S
    while "Server listening" not in log.read_text():
        if outside.poll() is not None or time.monotonic() > deadline:
            raise HostsError(f"an SSH server does not start: {log.read_text()[-2000:]}")
        time.sleep(_POLL_S)
    return next(
        child.pid
        for child in psutil.Process(outside.pid).children(recursive=True)
        if child.name() == "sshd"
    )


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise HostsError(f"`{shlex.join(words)}`: {done.stderr.strip()}")
