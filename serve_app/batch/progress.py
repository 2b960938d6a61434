"""Progress of a batch: rows, tokens/s and acceptance, on a terminal or as lines of a log."""

import time
from collections import deque
from dataclasses import dataclass

from eesd_dist.progress import progress_bar
from serve_app.batch.results import RowResult

_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Tokens of a run, and its duration."""

    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float | None:
        """Accepted tokens per drafted token; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


class JobProgress:
    """Counts and shows what a job has done. Close it in the end."""

    def __init__(self, *, total: int, initial: int, is_shown: bool) -> None:
        self._bar = progress_bar(total=total, initial=initial, unit="row", is_shown=is_shown)
        self._started_s = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()
        """Time and tokens of the rows of the last seconds."""
        self._num_failed = 0
        self._num_prompt_tokens = self._num_tokens = self._num_drafted = self._num_accepted = 0

    def take(self, result: RowResult) -> None:
        time_s = time.monotonic()
        usage = result.answer.get("usage") or {}
        metrics = result.answer.get("metrics") or {}
        speculation = metrics.get("speculative_decoding") or {}
        num_tokens = int(usage.get("completion_tokens") or 0)
        self._num_prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self._num_tokens += num_tokens
        self._num_drafted += int(speculation.get("num_draft_tokens") or 0)
        self._num_accepted += int(speculation.get("num_accepted_draft_tokens") or 0)
        self._num_failed += result.has_failed
        self._recent.append((time_s, num_tokens))
        while self._recent[0][0] < time_s - _WINDOW_S:
            self._recent.popleft()
        self._bar.set_postfix(self._shown(time_s), refresh=False)
        self._bar.update()

    @property
    def throughput(self) -> Throughput:
        return Throughput(
            seconds=time.monotonic() - self._started_s,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._num_tokens,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
        )

    def close(self) -> None:
        self._bar.close()

    def _shown(self, time_s: float) -> dict[str, str]:
        seconds = min(time_s - self._started_s, _WINDOW_S)
        rate = sum(tokens for _, tokens in self._recent) / max(seconds, 1e-3)
        shown = {"tokens/s": f"{rate:.0f}"}
        if self._num_drafted:
            shown["accepted"] = f"{self._num_accepted / self._num_drafted:.2f}"
        if self._num_failed:
            shown["failed"] = str(self._num_failed)
        return shown
