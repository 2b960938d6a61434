"""A Ray cluster over `tests.support.hosts`: a head on host 0, a node on each other host.

Every node has the resources `cpu` and `host<n>`, so that a test can place an actor. The head
declares a node dead six seconds after it is cut off. The service is started on host 0 as operators
start it, with `eesd serve --address`.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
import yaml

from tests.support.hosts import Hosts, HostsError

Resources = Mapping[str, float]

PORT = 8000
_GCS_PORT = 6379
_REDIS_PORT = 6390
_HEAD = ("--head", f"--port={_GCS_PORT}", "--include-dashboard=false")
_OBJECT_STORE_BYTES = 80 * 2**20
_STARTED = "Ray runtime started"
_START_S = 200.0
_STOP_S = 30.0
_SERVICE_STOP_S = 90.0
_POLL_S = 0.1
_REPOSITORY = Path(__file__).parents[2]


class RayHosts:
    """Runs Ray on all hosts while the block runs; the hosts must exist."""

    def __init__(
        self,
        hosts: Hosts,
        *,
        resources: Mapping[int, Resources] | None = None,
        cpus_per_host: int = 4,
        redis_on: int | None = None,
        ports: Mapping[str, int] | None = None,
    ) -> None:
        """`resources`: additional resources, by host. `redis_on`: the host of a Redis that keeps
        the state of the head; None: the head keeps it in its memory. `ports`: options of `ray
        start` and their numbers, on all hosts; Ray chooses the others."""
        self.hosts = hosts
        self._more = resources or {}
        self._cpus_per_host = cpus_per_host
        self._nodes: dict[int, subprocess.Popen[str]] = {}
        self._harmed: set[int] = set()
        """Hosts that were cut off or killed and not repaired since."""
        self._environment = _environment()
        self._redis_on = redis_on
        self._ports = ports or {}

    @property
    def address(self) -> str:
        return f"{self.hosts.address(0)}:{_GCS_PORT}"

    def __enter__(self) -> Self:
        if self._redis_on is not None:
            self._start_redis(self._redis_on)
        self._start(0)
        self._wait_until_started(0)
        for host in range(1, self.hosts.num_hosts):
            self._start(host)
        for host in range(1, self.hosts.num_hosts):
            self._wait_until_started(host)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in reversed(range(self.hosts.num_hosts)):
            self.hosts.kill_host(host)
        for node in self._nodes.values():
            node.wait(_STOP_S)

    def run(
        self, host: int, argv: Sequence[str], *, log: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Runs a program with this Python on a host, with access to the cluster."""
        words = [sys.executable, *argv]
        if log is None:
            return self.hosts.run(host, words, self._environment)
        with log.open("w") as output:
            return self.hosts.run(host, words, self._environment, output=output)

    def cut(self, host: int) -> None:
        """Takes the host off the network; `repair` brings it back."""
        self._harmed.add(host)
        self.hosts.cut(host)

    def power_off(self, host: int) -> None:
        """Stops a host abruptly: its processes close no connection."""
        self.cut(host)
        self.hosts.kill_host(host)

    def kill_raylet(self, host: int) -> None:
        """Kills the raylet of a host alone; the workers notice it and exit."""
        self._harmed.add(host)
        self._raylet(host).kill()

    def _raylet(self, host: int) -> psutil.Process:
        processes = [psutil.Process(pid) for pid in self.hosts.pids(host)]
        (raylet,) = [process for process in processes if process.name() == "raylet"]
        return raylet

    def suspend_raylet(self, host: int) -> None:
        """Stops the raylet of a host without ending it: it answers nothing, and closes nothing."""
        self._harmed.add(host)
        self._raylet(host).suspend()

    @contextmanager
    def mounted(self, host: int, mount: Sequence[str], at: Path) -> Iterator[None]:
        """Mounts something for the node of a host alone, which its new processes see.

        `mount`: the words of `mount` before the place. Each host has a mount namespace of its own.
        """
        inside = ["nsenter", "--mount", f"--target={self._raylet(host).pid}"]
        subprocess.run([*inside, "mount", *mount, str(at)], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "umount", "--lazy", str(at)], check=True)

    def repair(self) -> None:
        """Makes all hosts reachable, each with a Ray node of the cluster.

        A node that was cut off for longer than the health checks allow is dead to the cluster: its
        processes are killed, and a new node is started.
        """
        for host in tuple(self._harmed):
            self.hosts.mend(host)
            self.restart(host)
            self._harmed.discard(host)

    def restart(self, host: int) -> None:
        """Kills all processes of a host and starts its node again."""
        self.stop(host)
        self._start(host)
        self._wait_until_started(host)

    def stop(self, host: int) -> None:
        """Kills all processes of a host; its network stays."""
        self.hosts.kill_host(host)
        self._nodes[host].wait(_STOP_S)

    @contextmanager
    def service(
        self, tree: Mapping[str, object], *, listens_at: str | None = None
    ) -> Iterator["HostsService"]:
        """Runs `eesd serve` on host 0; yields when it answers, and removes it with `eesd stop`.

        `listens_at`: the address that HTTP proxies bind; None: that of host 0."""
        config = self.hosts.folder / "service.yaml"
        config.write_text(yaml.safe_dump(dict(tree)))
        log = self.hosts.folder / "service.log"
        host = self.hosts.address(0)
        words = ["serve", "--address", self.address, "--port", str(PORT)]
        words += ["--host", listens_at or host]
        words += ["--allow-no-key"]
        process = self.run(
            0, ["-m", "serve_app.cli.main", *words, "--config", str(config)], log=log
        )
        try:
            _wait_for(log, "Try it", process)
            yield HostsService(url=f"http://{host}:{PORT}", log=log, hosts=self.hosts)
        finally:
            process.kill()
            process.wait(_STOP_S)
            stop = ["-m", "serve_app.cli.main", "stop", "--address", self.address]
            self.run(0, stop, log=self.hosts.folder / "stop.log").wait(_SERVICE_STOP_S)

    def _start_redis(self, host: int) -> None:
        address = self.hosts.address(host)
        words = ["--bind", address, "--port", str(_REDIS_PORT), "--save", "", "--protected-mode"]
        self.hosts.run(host, ["redis-server", *words, "no"])
        self._environment["RAY_REDIS_ADDRESS"] = f"{address}:{_REDIS_PORT}"

    def _start(self, host: int) -> None:
        folder = self.hosts.folder / str(host)
        folder.mkdir(exist_ok=True)
        # Hosts share one process table: Ray would find the other nodes of this address, and refuse
        # to start a head again.
        (folder / "ray_current_cluster").unlink(missing_ok=True)
        resources = {f"host{host}": 100.0, **self._more.get(host, {})}
        words = [
            *(_HEAD if host == 0 else [f"--address={self.address}"]),
            "--block",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            f"--node-ip-address={self.hosts.address(host)}",
            f"--num-cpus={self._cpus_per_host}",
            "--num-gpus=0",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--resources={json.dumps(resources)}",
            f"--temp-dir={folder}",
            *(f"--{option}={port}" for option, port in self._ports.items()),
        ]
        self._nodes[host] = self.run(
            host, ["-m", "ray.scripts.scripts", "start", *words], log=self._log(host)
        )

    def _wait_until_started(self, host: int) -> None:
        _wait_for(self._log(host), _STARTED, self._nodes[host])

    def _log(self, host: int) -> Path:
        return self.hosts.folder / f"ray{host}.log"


class HostsService:
    """The service, accessed from this machine: over HTTP, and by its processes."""

    def __init__(self, *, url: str, log: Path, hosts: Hosts) -> None:
        self.url = url
        self.log = log
        self.hosts = hosts

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=30)

    def pipeline(self) -> dict[str, Any]:
        """Returns the state of its only pipeline, as in `/debug/pipelines`."""
        answer = httpx.get(f"{self.url}/debug/pipelines", timeout=30).raise_for_status()
        (state,) = answer.json()["pipelines"]
        return dict(state)

    def pid_of(self, worker: str) -> int:
        """Returns the pid of the process of a worker, e.g. `verify rank 1`."""
        return {m["name"]: int(m["pid"]) for m in self.pipeline()["workers"]}[worker]

    def host_of(self, worker: str) -> int:
        return self.hosts.host_of(self.pid_of(worker))


def bench_exact(hosts: Hosts, words: Sequence[str]) -> int:
    """Runs `eesd bench exact` across hosts that are made for it; returns its exit status."""
    with hosts, RayHosts(hosts) as cluster:
        argv = ["-m", "serve_app.cli.main", "bench", "exact", "--address", cluster.address, *words]
        return cluster.run(0, argv).wait()


def bench_chaos(hosts: Hosts, words: Sequence[str]) -> int:
    """Runs `eesd bench chaos` across hosts: separate stages, and links that are cut and restored.

    Five seconds are long enough for the connections over a link to be given up, and short enough
    for Ray to keep the node.
    """
    script = f"{sys.executable} -m tests.support.hosts {{}} --prefix {hosts.prefix} {{{{host}}}}"
    links = ["--link-down", script.format("cut"), "--link-up", script.format("mend")]
    # A connection to an HTTP replica breaks with its host, so replicas run on a host that is never
    # cut.
    front = ["--set", "placement.front={host0: 0.001}"]
    front += ["--set", "allow_no_key=true"]  # nothing else reaches these addresses
    spread = ["--set", "placement.strategy=SPREAD", *front, "--cut-s", "5"]
    with hosts, RayHosts(hosts) as cluster:
        argv = ["-m", "serve_app.cli.main", "bench", "chaos", "--address", cluster.address]
        return cluster.run(0, [*argv, *spread, *links, *words]).wait()


def _wait_for(log: Path, word: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _START_S
    while word not in log.read_text():
        status = process.poll()
        if status is not None or time.monotonic() > deadline:
            what = f"not within {_START_S:g} s" if status is None else f"ended with {status}"
            raise HostsError(f"{what}, waiting for {word!r}: {log.read_text()[-2000:]}")
        time.sleep(_POLL_S)


def _environment() -> dict[str, str]:
    """Returns the environment of a Ray start, without the caller's Ray settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return inherited | {
        "PYTHONPATH": str(_REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_worker_niceness": "0",
        # A host that does not answer is declared dead after six seconds instead of a minute.
        "RAY_health_check_initial_delay_ms": "3000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_kill_worker_timeout_milliseconds": "1000",
    }
