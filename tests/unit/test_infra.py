"""The files under infra/ parse; dashboard and alerts ask only for metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

INFRA = Path(__file__).parents[2] / "infra"
YAML_FILES = sorted(
    path.relative_to(INFRA) for end in ("yaml", "yml") for path in INFRA.rglob(f"*.{end}")
)
METRIC = re.compile(r"\beesd_\w+")


def _dashboard() -> dict[str, list[dict[str, list[dict[str, str]]]]]:
    content: dict[str, list[dict[str, list[dict[str, str]]]]] = json.loads(
        (INFRA / "grafana" / "dashboard.json").read_text()
    )
    return content


def _served_names() -> set[str]:
    """Returns the names of the table that is written from the code, as a scrape has them."""
    text = (INFRA.parent / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| `(eesd_\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert len(rows) > 40
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + end for name, kind in rows for end in ends.get(kind, ("",))}


def _rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((INFRA / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("path", YAML_FILES, ids=str)
def test_a_yaml_file_parses(path: Path) -> None:
    assert isinstance(yaml.safe_load((INFRA / path).read_text()), dict)


def test_the_dashboard_asks_only_for_metrics_that_are_served() -> None:
    expressions = [
        target["expr"] for panel in _dashboard()["panels"] for target in panel["targets"]
    ]
    names = {name for expression in expressions for name in METRIC.findall(expression)}
    assert len(names) > 30
    assert names <= _served_names()


def test_the_alerts_ask_only_for_metrics_that_are_served_and_are_explained() -> None:
    names = {name for rule in _rules() for name in METRIC.findall(rule["expr"])}
    assert len(names) > 10
    assert names <= _served_names()
    text = (INFRA.parent / "docs" / "observability.md").read_text()
    assert all(f"`{rule['alert']}`" in text for rule in _rules())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (prometheus)")
def test_the_alerts_fire_when_they_should() -> None:
    folder = INFRA / "prometheus"
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_panels_do_not_lie_on_one_another() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in _dashboard()["panels"]]  # type: ignore[call-overload]
    assert len(places) == len(set(places))


def test_the_compose_file_mounts_files_that_are_there() -> None:
    services = yaml.safe_load((INFRA / "docker-compose.yaml").read_text())["services"]
    mounts = [mount for service in services.values() for mount in service.get("volumes", [])]
    assert len(mounts) >= 4
    for mount in mounts:
        assert (INFRA / mount.split(":")[0]).exists(), mount
