"""The files under infra/ parse, and the dashboard asks only for metrics that exist."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.telemetry.metrics import ServiceMetrics

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
    """Returns the names in a scrape of the service, including labelled counters that are empty."""
    page = ServiceMetrics(model_name="m").render().decode()
    names: set[str] = set()
    for family in text_string_to_metric_families(page):
        ends = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
        }.get(family.type, ("",))
        names |= {family.name.removesuffix("_total") + end for end in ends}
    return names


@pytest.mark.parametrize("path", YAML_FILES, ids=str)
def test_a_yaml_file_parses(path: Path) -> None:
    assert isinstance(yaml.safe_load((INFRA / path).read_text()), dict)


def test_the_dashboard_asks_only_for_metrics_that_are_served() -> None:
    expressions = [
        target["expr"] for panel in _dashboard()["panels"] for target in panel["targets"]
    ]
    asked = {name for expression in expressions for name in METRIC.findall(expression)}
    assert len(asked) > 10
    assert asked <= _served_names()


def test_the_dashboards_panels_do_not_lie_on_one_another() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in _dashboard()["panels"]]  # type: ignore[call-overload]
    assert len(places) == len(set(places))


def test_every_dependency_is_pinned_exactly() -> None:
    lines = (INFRA / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all([spec.operator for spec in pin.specifier] == ["=="] for pin in pins)
    pinned = {pin.name.lower().replace("_", "-") for pin in pins}
    wanted = {Requirement(text).name.lower() for text in metadata.requires("eesd-dist") or []}
    assert wanted - {"eesd-dist"} <= pinned  # one extra contains another


def test_the_compose_file_mounts_files_that_are_there() -> None:
    services = yaml.safe_load((INFRA / "docker-compose.yaml").read_text())["services"]
    mounts = [mount for service in services.values() for mount in service.get("volumes", [])]
    assert len(mounts) >= 4
    for mount in mounts:
        assert (INFRA / mount.split(":")[0]).exists(), mount
