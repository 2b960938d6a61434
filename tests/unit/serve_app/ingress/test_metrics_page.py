"""One page out of several."""

from prometheus_client.parser import text_string_to_metric_families

from eesd_dist.telemetry.metrics import ServiceMetrics
from serve_app.ingress.metrics_page import joined, merged
from serve_app.openai.middleware.http_metrics import HttpMetrics
from serve_app.pipeline.reports import MetricsPage


def test_families_stay_together_and_every_sample_says_which_pipeline() -> None:
    first, second = ServiceMetrics(model_name="m"), ServiceMetrics(model_name="m")
    first.observe_load(num_running=3, num_waiting=0, kv_usage=0.5)
    second.observe_load(num_running=4, num_waiting=1, kv_usage=0.1)
    page = merged(
        [
            MetricsPage(pipeline="a", text=first.render()),
            MetricsPage(pipeline="b", text=second.render()),
        ]
    ).decode()
    families = list(text_string_to_metric_families(page))
    assert len({f.name for f in families}) == len(families)
    running = next(f for f in families if f.name == "eesd_num_requests_running")
    assert {s.labels["pipeline"]: s.value for s in running.samples} == {"a": 3.0, "b": 4.0}
    assert page.count("# TYPE eesd_time_to_first_token_seconds histogram") == 1


def test_no_pipeline_makes_an_empty_page() -> None:
    assert merged([]) == b""


def test_a_pipeline_without_a_drafting_actor_leaves_the_others_alone() -> None:
    page = merged(
        [
            MetricsPage(pipeline="a", text=b""),
            MetricsPage(pipeline="b", text=ServiceMetrics(model_name="m").render()),
        ]
    )
    assert b'pipeline="b"' in page
    assert b'pipeline="a"' not in page


def test_pages_of_ingresses_keep_their_labels() -> None:
    pages = [HttpMetrics(ingress=name).page() for name in "ab"]
    families = list(text_string_to_metric_families(joined((p, {}) for p in pages).decode()))
    assert len({f.name for f in families}) == len(families)
    opened = next(f for f in families if f.name == "eesd_http_open_requests")
    assert [s.labels["ingress"] for s in opened.samples] == ["a", "b"]
