"""Prometheus scrapes the running service, and evaluates dashboard and alerts on what it gets."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.support.running import Running, free_port, until

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus (apt-get install prometheus)"
)
INFRA = Path(__file__).parents[3] / "infra"
NOT_THERE = frozenset(
    {
        "eesd_degraded",  # without --fallback
        "eesd_pipeline_recovery_seconds",  # before the first interruption
        "eesd_key_tokens_total",  # without keys
        "eesd_key_requests_total",
    }
)


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        answer.raise_for_status()
        content = answer.json()
        assert content["status"] == "success", content
        return content["data"]

    def value(self, expression: str) -> list[Any]:
        series: list[Any] = self.get("query", query=expression)["result"]
        return series


@pytest.fixture(scope="module")
def prometheus(service: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())
    at = urlsplit(service.url)
    [job] = [job for job in config["scrape_configs"] if job["job_name"] == "eesd"]
    job["static_configs"] = [{"targets": [at.netloc]}]
    config["global"] = {"scrape_interval": "3s", "evaluation_interval": "3s"}
    config["scrape_configs"] = [job]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(INFRA / "prometheus" / "alerts.yml", folder)
    port = free_port()
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=log,
        )
        try:
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            running.terminate()
            running.wait(30)


def _complete(service: Running) -> None:
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 24, "temperature": 0.5}
    assert httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_the_service_is_scraped_and_dashboard_and_alerts_can_be_evaluated(
    service: Running, prometheus: Prometheus
) -> None:
    def targets() -> Any:
        try:
            return prometheus.get("targets")["activeTargets"]
        except httpx.HTTPError:  # it does not listen yet, or answers 503 while it starts
            return []

    until(lambda: [target for target in targets() if target["health"] == "up"], timeout_s=60)
    _complete(service)
    assert httpx.post(f"{service.url}/v1/completions", json={}, timeout=60).status_code == 400

    def are_evaluated() -> Any:
        _complete(service)
        rules = [r for g in prometheus.get("rules")["groups"] for r in g["rules"]]
        is_done = rules and all(rule["health"] == "ok" for rule in rules)
        seen = prometheus.value("rate(eesd_generation_tokens_total[30s]) > 0")
        return rules if is_done and seen else None

    rules = until(are_evaluated, timeout_s=60)
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    assert "EesdNoPipelineReady" not in firing
    assert "EesdServerErrors" not in firing

    panels = json.loads((INFRA / "grafana" / "dashboard.json").read_text())["panels"]
    expressions = [
        target["expr"].replace("$model", ".*").replace("$__rate_interval", "30s")
        for panel in panels
        for target in panel["targets"]
    ]
    undrawn = {
        expression
        for expression in expressions
        if not NOT_THERE & set(re.findall(r"eesd_\w+", expression))
    }
    assert len(undrawn) > 20

    def all_are_drawn() -> bool:
        _complete(service)
        undrawn.difference_update(
            [expression for expression in expressions if prometheus.value(expression)]
        )
        return not undrawn

    until(all_are_drawn, timeout_s=60)
    assert not undrawn, "nothing comes of these"
