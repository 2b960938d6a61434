"""Merges the Prometheus pages of several processes into one.

Families that several pages have are merged. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve_app.pipeline.deployment import MetricsPage


def merged(pages: Iterable[MetricsPage]) -> bytes:
    """Merges pages of pipelines: every sample gets the label `pipeline`."""
    return joined((page.text, {"pipeline": page.pipeline}) for page in pages)


def joined(pages: Iterable[tuple[bytes, Mapping[str, str]]]) -> bytes:
    """Merges pages, with labels for all samples of each."""
    families: dict[str, Metric] = {}
    for page, more in pages:
        for family in text_string_to_metric_families(page.decode()):
            into = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, **more}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed:
    """Collector of families that are collected already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
