"""Progress of a batch: rows, tokens/s and acceptance, on a terminal or as lines of a log."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from eesd_dist.progress import progress_bar
from serve_app.batch.results import RowResult
from serve_app.batch.timeline import Timeline

_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Tokens of a run, and its duration."""

    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def start_s(self) -> float:
        """Seconds before the first token."""
        return self.timeline.first_token_s()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second since the first one."""
        seconds = self.seconds - self.start_s
        return self.num_tokens / seconds if seconds > 0 else 0.0

    @property
    def acceptance(self) -> float | None:
        """Accepted tokens per drafted token; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


class JobProgress:
    """Counts and shows what a job has done since it was started."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        """Bar on standard error; None while there is none."""
        self._started_s = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()
        """Time and tokens of the rows of the last seconds."""
        self._timeline = Timeline()
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
        end_s = time_s - self._started_s
        begin_s = max(0.0, end_s - float(metrics.get("generation_time_ms") or 0.0) / 1000)
        self._timeline.add(begin_s, end_s, num_tokens=num_tokens)
        self._recent.append((time_s, num_tokens))
        while self._recent[0][0] < time_s - _WINDOW_S:
            self._recent.popleft()
        if self._bar is not None:
            self._bar.set_postfix(self._figures(time_s), refresh=False)
            self._bar.update()

    @contextmanager
    def shown(self, total: int, initial: int) -> Iterator[None]:
        """Shows the rows within the block, of `total` with `initial` from earlier runs."""
        with progress_bar(total=total, initial=initial, unit="row") as self._bar:
            yield
        self._bar = None

    @property
    def throughput(self) -> Throughput:
        return Throughput(
            seconds=time.monotonic() - self._started_s,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._num_tokens,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
            timeline=self._timeline,
        )

    def _figures(self, time_s: float) -> dict[str, str]:
        seconds = min(time_s - self._started_s, _WINDOW_S)
        rate = sum(tokens for _, tokens in self._recent) / max(seconds, 1e-3)
        figures = {"tokens/s": f"{rate:.0f}"}
        if self._num_drafted:
            figures["accepted"] = f"{self._num_accepted / self._num_drafted:.2f}"
        if self._num_failed:
            figures["failed"] = str(self._num_failed)
        return figures
