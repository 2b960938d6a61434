"""The metrics of a pipeline's state."""

from prometheus_client.parser import text_string_to_metric_families

from serve_app.pipeline.interruptions import state_page


def _samples(page: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(page.decode())
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return {name: value for name, value in samples.items() if not name.endswith("_created")}


def test_a_pipeline_that_nothing_has_interrupted() -> None:
    page = state_page(
        is_ready=True, num_interruptions=0, recovery_s=None, is_degraded=None, degraded_s=0.0
    )
    assert _samples(page) == {"eesd_pipeline_ready": 1.0, "eesd_pipeline_interruptions_total": 0.0}


def test_a_pipeline_that_was_interrupted_and_is_degraded() -> None:
    page = state_page(
        is_ready=True, num_interruptions=2, recovery_s=1.5, is_degraded=True, degraded_s=1.25
    )
    assert _samples(page) == {
        "eesd_pipeline_ready": 1.0,
        "eesd_pipeline_interruptions_total": 2.0,
        "eesd_pipeline_recovery_seconds": 1.5,
        "eesd_degraded": 1.0,
        "eesd_degraded_seconds_total": 1.25,
    }
