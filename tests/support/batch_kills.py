"""Runs batch jobs over hosts, of which something is killed at a random time, and continues them.

    python -m tests.support.batch_kills [--runs 20] [--seed 0] [--record FILE.json]

Three hosts: the job's driver and a service on host 0, an engine on each of the others. A run kills
the driver, an engine, a whole host or a process of the service. Then all rows must be answered,
each once, with the texts of an undisturbed run in one process.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from eesd_dist.provenance import collect_provenance
from tests.support.hosts import Hosts
from tests.support.ray_hosts import HostsService, RayHosts
from tests.support.running import until
from tests.support.tiny_service import write_tiny_service

NUM_ROWS = 600
_TIMEOUT_S = 240.0
_NUM_STARTS = 4
"""Starts of a job that may be needed; a driver is killed once."""


class BatchOverHosts:
    """Runs one job, and kills what it needs."""

    def __init__(self, cluster: RayHosts, model: Path, folder: Path) -> None:
        self.cluster, self._model, self._folder = cluster, model, folder
        self.rows = folder / "rows.jsonl"
        rows = [
            {"prompt": f"the dog {i % 60} sat on", "max_tokens": 16 + i % 60, "temperature": 0.8}
            for i in range(NUM_ROWS)
        ]
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._process: subprocess.Popen[str] | None = None

    def undisturbed(self) -> Mapping[str, str]:
        """Returns the texts of the job in one process, by id."""
        output = self._folder / "expected.jsonl"
        command = [sys.executable, "-m", "serve_app.cli.main", *self._words(output)]
        subprocess.run([*command, *self._engine(), "--in-process"], check=True)
        return texts_of(output)

    def start(
        self, output: Path, *, url: str | None = None, num_engines: int = 2
    ) -> "subprocess.Popen[str]":
        """Starts the job on host 0: with engines on the hosts, or over a service."""
        where = ["--url", url] if url else [*self._engine(), "--address", self.cluster.address]
        engines = [] if url else ["--engines", str(num_engines)]
        words = ["-m", "serve_app.cli.main", *self._words(output), *where, *engines]
        self._process = self.cluster.run(0, words, log=output.with_suffix(".log"))
        return self._process

    def wait_for_rows(self, output: Path, number: int) -> None:
        def is_there() -> bool:
            assert self._process is not None
            ended = self._process.poll() is not None
            assert not ended, output.with_suffix(".log").read_text()
            return num_records(output) >= number

        until(is_there, timeout_s=_TIMEOUT_S)

    def kill_driver(self) -> None:
        assert self._process is not None
        self._process.kill()

    def kill_engine(self, rng: random.Random) -> None:
        hosts = range(self.cluster.hosts.num_hosts)
        engines = [
            process
            for pid in {pid for host in hosts for pid in self.cluster.hosts.pids(host)}
            if _title(process := psutil.Process(pid)).startswith("ray::BatchEngine")
        ]
        rng.choice(engines).kill()

    def _words(self, output: Path) -> Sequence[str]:
        return ["batch", str(self.rows), str(output), "--quiet", "--concurrency", "8"]

    def _engine(self) -> Sequence[str]:
        words = ["--model", str(self._model), "--dtype", "float32", "--device", "cpu"]
        return [*words, "--set", "engine.parallel.num_threads=1"]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def num_records(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def texts_of(output: Path) -> Mapping[str, str]:
    """Returns texts by id. Raises AssertionError where an id is there twice."""
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}
    assert len(texts) == len(records), "a row was answered twice"
    return texts


def finish(job: BatchOverHosts, output: Path, *, url: str | None) -> int:
    """Waits for the job, and starts it again until it is done; returns the number of starts."""
    for number in range(_NUM_STARTS):
        process = job.start(output, url=url) if number or job._process is None else job._process
        if process.wait(_TIMEOUT_S) == 0:
            return number + 1
    raise AssertionError(output.with_suffix(".log").read_text())


def main(arguments: argparse.Namespace) -> int:
    """Returns 1 if a row was lost, repeated or changed."""
    rng = random.Random(arguments.seed)
    hosts = Hosts(3, prefix="eesdb", subnet="10.77.12")
    runs: list[Mapping[str, object]] = []
    with tempfile.TemporaryDirectory() as name, hosts, RayHosts(hosts, cpus_per_host=2) as cluster:
        folder = Path(name)
        model = write_tiny_service(folder / "tiny")
        job = BatchOverHosts(cluster, model, folder)
        expected = job.undisturbed()
        with cluster.service(_service(model)) as service:
            kinds: Sequence[str] = ("driver", "engine", "host", "service")
            for number in range(arguments.runs):
                kind = kinds[number % len(kinds)]
                runs.append(_run(job, kind, number, rng, service, expected, folder))
                _say(runs[-1])
    totals = {
        key: sum(int(str(run[key])) for run in runs) for key in ("lost", "repeated", "changed")
    }
    _say(totals)
    if arguments.record is not None:
        content = {"runs": runs, "rows_per_run": NUM_ROWS, **totals}
        content["provenance"] = asdict(collect_provenance())
        arguments.record.write_text(json.dumps(content, indent=1, default=str) + "\n")
    return int(any(totals.values()))


def _say(content: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def _run(
    job: BatchOverHosts,
    kind: str,
    number: int,
    rng: random.Random,
    service: HostsService,
    expected: Mapping[str, str],
    folder: Path,
) -> Mapping[str, object]:
    output = folder / f"{number}.jsonl"
    url = service.url if kind == "service" else None
    began_s = time.monotonic()
    job.start(output, url=url)
    after = rng.randrange(1, NUM_ROWS - 100)
    job.wait_for_rows(output, after)
    kills: Mapping[str, Callable[[], None]] = {
        "driver": job.kill_driver,
        "engine": lambda: job.kill_engine(rng),
        "host": lambda: job.cluster.power_off(rng.choice([1, 2])),
        "service": lambda: psutil.Process(
            service.pid_of(rng.choice(["drafting actor", "verify rank 0"]))
        ).kill(),
    }
    kills[kind]()
    num_starts = finish(job, output, url=url)
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    ids = [record["custom_id"] for record in records]
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}
    job.cluster.repair()
    return {
        "kind": kind,
        "after_rows": after,
        "starts": num_starts,
        "seconds": round(time.monotonic() - began_s, 1),
        "lost": len(expected.keys() - texts.keys()),
        "repeated": len(ids) - len(texts),
        "changed": sum(texts[name] != expected.get(name) for name in texts),
    }


def _service(model: Path) -> Mapping[str, object]:
    return {
        "engine": {
            "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
            "cache": {"num_pages": 256},
            "parallel": {"timeout_s": 3.0},
        },
        "model_name": "tiny",
        "placement": {
            "draft": {"resources": {"host0": 1}},
            "verify": {"resources": {"host0": 1}},
            "front": {"host0": 0.001},
        },
        "recovery": {"stream_pause_s": 120.0, "max_interruptions": 20},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    sys.exit(main(parser.parse_args()))
