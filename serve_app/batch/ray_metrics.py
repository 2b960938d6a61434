"""Metrics of a job in Ray: Prometheus gets them from the node of the driver, as `ray_eesd_*`."""

from ray.util.metrics import Counter, Gauge

from serve_app.batch.loop import TakeResult
from serve_app.batch.results import RowResult


class RayMetrics:
    """Counts results on their way."""

    def __init__(self, take: TakeResult, *, num_rows: int) -> None:
        """`num_rows`: rows to run."""
        self._take = take
        self._num_left = num_rows
        self._rows = Counter("eesd_batch_rows", "Rows with a result.", tag_keys=("outcome",))
        self._tokens = Counter("eesd_batch_generation_tokens", "Tokens of answers.")
        self._left = Gauge("eesd_batch_rows_left", "Rows without a result.")
        self._left.set(num_rows)

    def take(self, result: RowResult) -> None:
        """Passes a result on. Raises what taking it raises."""
        self._take(result)
        self._num_left -= 1
        self._left.set(self._num_left)
        self._rows.inc(1, tags={"outcome": "failed" if result.has_failed else "answered"})
        num_tokens = (result.answer.get("usage") or {}).get("completion_tokens") or 0
        if num_tokens:
            self._tokens.inc(num_tokens)
