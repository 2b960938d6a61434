"""How many pipelines a service has, for Serve's autoscaler.

Streams do not pass through Serve's replicas, so each pipeline reports its live requests. Serve
applies its own bounds and delays to the result.
"""

from typing import Any

LIVE = "eesd_live_requests"
"""Name of the pipelines' metric."""


def pipelines_for_load(context: Any) -> tuple[float, dict[str, Any]]:
    """Returns how many pipelines the live requests need, at the target for each, and no state.

    `context` is Serve's AutoscalingContext.
    """
    live = (context.aggregated_metrics or {}).get(LIVE, {})
    if not live:  # no pipeline has reported yet
        return context.target_num_replicas, {}
    return sum(live.values()) / context.config.get_target_ongoing_requests(), {}
