"""Merges the Prometheus pages of several pipelines into one.

Every sample gets the label `pipeline`; families that several pages have are merged. Pure.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve_app.pipeline.deployment import MetricsPage


def merged(pages: Iterable[MetricsPage]) -> bytes:
    families: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.text.decode()):
            into = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "pipeline": page.pipeline}
                into.add_sample(sample.name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed:
    """Collector of families that are collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
