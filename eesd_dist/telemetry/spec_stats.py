"""The `metrics.speculative_decoding` object of one response, in vLLM's shape.

Clients of vLLM's per-request acceptance metrics can read it unchanged. A step is a round that
verified a draft; rounds of plain decoding are not counted. The bonus token is counted in the mean
acceptance length only.
"""

from typing import TypedDict

from eesd_dist.types import Emission


class SpeculativeDecoding(TypedDict):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class SpecStats:
    """Acceptance counts of one request, in constant memory."""

    def __init__(self, *, num_spec_tokens: int) -> None:
        """`num_spec_tokens` is the maximum length of one draft."""
        self._num_spec_tokens = num_spec_tokens
        self._by_length: dict[int, list[int]] = {}

    def observe(self, emission: Emission) -> None:
        drafted = emission.num_drafted
        if drafted == 0:
            return
        row = self._by_length.setdefault(drafted, [0] * (drafted + 1))
        row[min(emission.num_accepted, drafted)] += 1

    def summary(self) -> SpeculativeDecoding:
        histogram = self._histogram()
        steps = sum(histogram)
        accepted = sum(count * number for number, count in enumerate(histogram))
        drafted = sum(length * sum(row) for length, row in self._by_length.items())
        return {
            "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {
                str(length): list(row) for length, row in sorted(self._by_length.items())
            },
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self._num_spec_tokens,
        }

    def _histogram(self) -> list[int]:
        """Returns a dense list of length num_spec_tokens + 1."""
        histogram = [0] * (max(self._num_spec_tokens, *self._by_length, 0) + 1)
        for row in self._by_length.values():
            for number, count in enumerate(row):
                histogram[number] += count
        return histogram
