"""Labels of workload classes in metrics, which clients name."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.config import SpeculationConfig
from eesd_dist.types import RequestId
from eesd_dist.workers.messages import Admission, RouterNews
from serve_app.config import RouterConfig
from serve_app.ingress.metrics_page import OTHER, belief_page
from serve_app.openai.workloads import UNNAMED_CLASSES, workload_of
from serve_app.router.actor import MAX_NAMES_OF_A_CALLER, FirstNames, Router


def _news(
    *, admitted: tuple[Admission, ...] = (), finished: tuple[RequestId, ...] = ()
) -> RouterNews:
    return RouterNews(pipeline="p", admitted=admitted, outcomes=(), finished=finished)


def _samples(page: bytes) -> dict[str, dict[str, float]]:
    """Returns the values by metric and label."""
    return {
        family.name: {sample.labels["workload"]: sample.value for sample in family.samples}
        for family in text_string_to_metric_families(page.decode())
    }


def test_the_first_names_stay() -> None:
    names = FirstNames(limit=2)
    assert names.note([("", "a")]) == ("a",)
    assert names.note([("", "a"), ("", "b"), ("", "c")]) == ("a", "b")
    assert names.note([("", "d")]) == ("a", "b")


def test_one_caller_leaves_names_to_the_others() -> None:
    names = FirstNames(limit=4, limit_of_a_caller=2)
    assert names.note([("hostile", f"h{number}") for number in range(9)]) == ("h0", "h1")
    assert names.note([("modest", "h1"), ("modest", "m"), ("modest", "n")])[2:] == ("m", "n")


def test_classes_without_a_label_are_added_up() -> None:
    def belief(mean: float, weight: float, num_live: int) -> dict[str, float]:
        return {"mean": mean, "weight": weight, "num_live": num_live}

    workloads = {"a": belief(0.5, 4.0, 1), "b": belief(0.2, 1.0, 2), "c": belief(0.8, 3.0, 4)}
    samples = _samples(belief_page(workloads, labels=["a"]))
    assert samples["eesd_belief_live_requests"] == {"a": 1.0, OTHER: 6.0}
    assert samples["eesd_belief_weight"] == {"a": 4.0, OTHER: 4.0}
    assert samples["eesd_belief_acceptance"] == {"a": 0.5, OTHER: pytest.approx(0.65)}
    unknown = {"b": belief(0.4, 0.0, 0), "c": belief(0.6, 0.0, 0)}
    samples = _samples(belief_page(unknown, labels=[]))
    assert samples["eesd_belief_acceptance"] == {OTHER: pytest.approx(0.5)}


def test_every_class_of_requests_that_name_none_is_listed() -> None:
    classes = {
        workload_of(None, kind=kind, temperature=temperature, by_temperature=by_temperature)
        for kind in ("chat", "completion")
        for temperature in (0.0, 0.3, 0.7, 1.0, 1.5)
        for by_temperature in (False, True)
    }
    assert classes == UNNAMED_CLASSES


def test_a_client_that_names_ten_thousand_classes_makes_few_time_series() -> None:
    async def run() -> set[str]:
        router = Router(RouterConfig(), SpeculationConfig())
        labels: set[str] = set()
        for first in range(0, 10_000, 500):
            ids = [RequestId(f"r{number}") for number in range(first, first + 500)]
            admitted = [Admission(name, f"hostile/{name}", "hostile") for name in ids]
            admitted.append(Admission(RequestId("mine"), "code", "modest"))
            await router.advise(_news(admitted=tuple(admitted)))
            described = await router.describe()
            names = UNNAMED_CLASSES.union(described["named"])  # type: ignore[arg-type]
            page = belief_page(described["workloads"], labels=names)  # type: ignore[arg-type]
            labels |= _samples(page)["eesd_belief_live_requests"].keys()
            await router.advise(_news(finished=tuple(ids)))
        return labels

    labels = asyncio.run(run())
    assert {"code", OTHER} <= labels
    assert len(labels) <= MAX_NAMES_OF_A_CALLER + len(UNNAMED_CLASSES) + 2
