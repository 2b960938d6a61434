"""`ray up` with the shipped on-premises file: late hosts, a completion, changes, `ray down`.

The tests of this module are one story on one cluster, in this order. In the shipped files only the
network of the addresses is replaced; SSH user and key are those of the files.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import EngineConfig, ModelConfig
from eesd_dist.engine.local import LocalEngine
from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams
from tests.support.running import until
from tests.support.ssh_hosts import SshHosts, can_make_ssh_hosts

pytestmark = pytest.mark.alone

_HEAD, _DRAFT, _VERIFY, _SPARE_VERIFY = range(4)
"""Lines of onprem-hosts.txt, after the head."""
_SHIPPED_NETWORK = "10.0.0"
_UP = "ray up -y cluster/configs/onprem.yaml"
_DOWN = "ray down -y cluster/configs/onprem.yaml"
_EDITED = ("cluster/configs/onprem.yaml", "cluster/configs/onprem-hosts.txt")
_SERVE_FILE = "cluster/configs/serve/demo.yaml"
_KEY = "0123456789abcdef0123456789abcdef"
_DEPLOYED = "Sent deploy request successfully"
_LATE_S = 20.0
_VERY_LATE_S = 200.0
_UP_S = 420.0
_DOWN_S = 60.0
_WORKERS_END_S = 60.0
"""Ten seconds without a head, and the end of what the raylet leaves; more on a busy machine."""
_PROMPT = "How many minutes are in three hours?"
_NUM_TOKENS = 24


@cache
def _why_not() -> str | None:
    return can_make_ssh_hosts()


class Cluster:
    """The machine of the operator, and the hosts of the cluster file."""

    def __init__(self, hosts: SshHosts, logs: Path) -> None:
        self.hosts = hosts
        self.logs = logs
        self.url = f"http://{hosts.hosts.address(_HEAD)}:8000"
        home = hosts.home(hosts.operator)
        self._checkout = home / "eesd-dist"
        (home / ".ray").mkdir()
        (home / ".ray" / "eesd_api_key").write_text(_KEY)
        network = hosts.hosts.address(_HEAD).rpartition(".")[0]
        for name in _EDITED:
            self.edit(name, lambda text: text.replace(_SHIPPED_NETWORK, network))
        self.run("ray get-auth-token --generate", timeout_s=60)

    def edit(self, name: str, change: Callable[[str], str]) -> None:
        """Changes a file of the operator's checkout."""
        path = self._checkout / name
        before = path.read_text()
        path.write_text(change(before))
        assert path.read_text() != before

    def run(self, command: str, *, timeout_s: float) -> str:
        """Runs a command of the operator to its end; returns its output."""
        return self.started(command).result(timeout_s=timeout_s)

    def started(self, command: str) -> "Command":
        return Command(self.hosts, command, self.logs)

    def redeploy(self) -> None:
        """Brings the Serve file of the operator to the head, and deploys it."""
        up = f"ray rsync-up cluster/configs/onprem.yaml {_SERVE_FILE} '~/eesd-dist/{_SERVE_FILE}'"
        deploy = f"cd ~/eesd-dist && serve deploy {_SERVE_FILE}"
        output = self.run(f"{up} && ray exec cluster/configs/onprem.yaml '{deploy}'", timeout_s=90)
        assert _DEPLOYED in output

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=_headers(), timeout=30)

    def pipelines(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the pipelines that are ready, by name."""
        states = self.get("/debug/pipelines").raise_for_status().json()["pipelines"]
        return {state["pipeline"]: state for state in states if state["is_ready"]}

    def complete(self, **more: object) -> httpx.Response:
        body = {"model": "demo_model", "prompt": _PROMPT, "temperature": 0.0, **more}
        body |= {"max_tokens": _NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        url = f"{self.url}/v1/completions"
        return httpx.post(url, json=body, headers=_headers(), timeout=120)


class Command:
    """A command of the operator that runs."""

    _count = 0

    def __init__(self, hosts: SshHosts, command: str, logs: Path) -> None:
        Command._count += 1
        self.log = logs / f"command{Command._count}.log"
        self._command = command
        self._process = hosts.start(hosts.operator, command, log=self.log)

    def wait_for(self, words: str, *, timeout_s: float) -> None:
        until(lambda: words in self.log.read_text(), timeout_s=timeout_s)

    def result(self, *, timeout_s: float) -> str:
        status = self._process.wait(timeout_s)
        output = self.log.read_text()
        assert status == 0, f"{self._command}: exit status {status}: {output[-4000:]}"
        return output


def _headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {_KEY}"}


def _hosts(logs: Path) -> Iterator[Cluster]:
    reason = _why_not()
    if reason is not None:
        pytest.skip(f"no test hosts: {reason}")
    with SshHosts(4, prefix="eesdu", subnet="10.77.21") as hosts:
        hosts.boot(_HEAD)
        yield Cluster(hosts, logs)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _hosts(tmp_path_factory.mktemp("ray-up"))


@pytest.fixture(scope="module")
def single_process() -> list[int]:
    """The tokens of the completion in one process, without Ray."""
    llm = LocalEngine(EngineConfig(model=ModelConfig(path=BUNDLED_MODEL)))
    request = Request(
        request_id=RequestId("one"),
        prompt=Tokenizer.load(BUNDLED_MODEL).encode(_PROMPT),
        sampling=SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS),
    )
    (output,) = llm.generate([request])
    return list(output.tokens)


def test_ray_up_says_what_it_waits_for_and_ends_when_the_service_is_healthy(
    cluster: Cluster,
) -> None:
    up = cluster.started(_UP)
    up.wait_for(_DEPLOYED, timeout_s=_UP_S)
    cluster.hosts.boot(_DRAFT)
    time.sleep(_LATE_S)
    assert cluster.get("/health").status_code != 200
    cluster.hosts.boot(_VERIFY)
    output = up.result(timeout_s=_UP_S)
    assert "the service is healthy" in output
    assert "eesd_verify" in output
    assert cluster.get("/health").status_code == 200


def test_a_completion_across_two_hosts_has_the_tokens_of_one_process(
    cluster: Cluster, single_process: list[int]
) -> None:
    (state,) = cluster.pipelines().values()
    address = cluster.hosts.hosts.address
    assert {worker["host"] for worker in state["workers"]} == {address(_DRAFT), address(_VERIFY)}
    (choice,) = cluster.complete().raise_for_status().json()["choices"]
    assert choice["token_ids"] == single_process


def test_a_second_pipeline_starts_when_its_host_comes_and_the_first_one_stays(
    cluster: Cluster, single_process: list[int]
) -> None:
    (first,) = cluster.pipelines()
    cluster.edit(
        _SERVE_FILE,
        lambda text: text.replace(
            "- name: Pipeline\n        num_replicas: 1", "- name: Pipeline\n        num_replicas: 2"
        ),
    )
    cluster.redeploy()
    cluster.hosts.boot(_SPARE_VERIFY)
    until(lambda: len(cluster.pipelines()) == 2, timeout_s=240)
    (second,) = cluster.pipelines().keys() - {first}
    hosts = {worker["host"] for worker in cluster.pipelines()[second]["workers"]}
    assert cluster.hosts.hosts.address(_SPARE_VERIFY) in hosts
    (choice,) = cluster.complete().raise_for_status().json()["choices"]
    assert choice["token_ids"] == single_process


def test_new_limits_reach_the_running_replicas_and_replace_none(cluster: Cluster) -> None:
    before = {name: state["pid"] for name, state in cluster.pipelines().items()}
    assert cluster.complete(n=2).status_code == 200
    cluster.edit(_SERVE_FILE, lambda text: text.replace("max_choices: 128", "max_choices: 1"))
    cluster.redeploy()
    until(lambda: cluster.complete(n=2).status_code == 400, timeout_s=60)
    assert cluster.complete().status_code == 200
    assert {name: state["pid"] for name, state in cluster.pipelines().items()} == before


def test_ray_down_leaves_no_process_on_any_host(cluster: Cluster) -> None:
    assert all(cluster.hosts.processes(host) for host in range(4))
    cluster.run(_DOWN, timeout_s=_DOWN_S)
    until(lambda: not _running(cluster), timeout_s=_WORKERS_END_S)


def _running(cluster: Cluster) -> list[str]:
    """Returns what still runs on the hosts; `until` shows it when it stays."""
    return [
        f"host {host}: {command[:200]}"
        for host in range(cluster.hosts.num_nodes)
        for command in cluster.hosts.processes(host).values()
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_that_come_200_s_after_the_head_bring_the_service_up_by_themselves(
    tmp_path: Path,
) -> None:
    for cluster in _hosts(tmp_path):
        up = cluster.started(_UP)
        up.wait_for(_DEPLOYED, timeout_s=_UP_S)
        time.sleep(_VERY_LATE_S)
        assert cluster.get("/health").status_code != 200
        for host in (_DRAFT, _VERIFY, _SPARE_VERIFY):
            cluster.hosts.boot(host)
        assert "the service is healthy" in up.result(timeout_s=_UP_S)
        assert cluster.complete().status_code == 200
