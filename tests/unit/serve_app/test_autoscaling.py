"""As many pipelines as the live requests need."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from serve_app.autoscaling import LIVE, pipelines_for_load


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        pytest.param({"a": 16.0, "b": 16.0}, 2.0, id="as planned"),
        pytest.param({"a": 40.0, "b": 8.0}, 3.0, id="more than two pipelines can have"),
        pytest.param({"a": 0.0, "b": 4.0}, 0.25, id="few"),
        pytest.param({}, 2, id="no pipeline has reported yet"),
    ],
)
def test_pipelines_follow_the_live_requests(live: dict[str, float], wanted: float) -> None:
    context = SimpleNamespace(
        aggregated_metrics={LIVE: live},
        target_num_replicas=2,
        config=AutoscalingConfig(target_ongoing_requests=16.0),
    )
    assert pipelines_for_load(context) == (wanted, {})
