"""A pipeline of the simulation: requests that share its rounds, and a queue before them.

A round of b requests takes `fixed_s + b * request_s` seconds and gives each of them
`tokens_per_turn` tokens. Between two events every running request gains tokens at the same rate. A
prompt is work too, in units of generated tokens: `prompt_share` for each of its tokens.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from cluster.fleet.arrivals import Arrival
from cluster.fleet.setting import Speed
from eesd_dist.routing.activity import (
    FIRST_TOKEN_WINDOW_S,
    WINDOW_S,
    Activity,
    percentile,
)

_LEFT = 1e-9
"""Work that is left by rounding."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A request in the fleet."""

    arrival: Arrival
    work: float = 0.0
    """Prompt tokens to compute before the next token, in units of generated tokens."""
    done: float = 0.0
    """Tokens generated so far."""
    arrived_s: float = 0.0
    """At its present pipeline."""
    first_token_s: float | None = None
    """When its first token left."""
    num_moves: int = 0
    """Times that another pipeline continued it."""

    @property
    def is_over(self) -> bool:
        return self.done >= self.arrival.num_tokens - _LEFT


@dataclass(slots=True, kw_only=True)
class SimulatedPipeline:
    """Serves jobs until it is stopped; `ended` is called with each job that is over."""

    name: str
    env: simpy.Environment
    speed: Speed
    ended: Callable[[Job], None]
    is_draining: bool = False
    _running: list[Job] = field(default_factory=list)
    _queue: list[Job] = field(default_factory=list)
    _num_tokens: float = 0.0
    """Generated so far, by all jobs."""
    _counts: deque[tuple[float, float]] = field(default_factory=deque)
    """When it was asked for its activity of late, and how many tokens it had generated."""
    _first_tokens: deque[tuple[float, float]] = field(default_factory=deque)
    """When first tokens left of late, and how long after the arrival of their jobs here."""
    _since_s: float = 0.0
    """Up to when the running jobs are accounted for."""
    _change: simpy.Event | None = None
    """Wakes the pipeline: its jobs have changed."""

    @property
    def num_live(self) -> int:
        return len(self._running) + len(self._queue)

    def activity(self) -> Activity:
        """Returns what a pipeline of the service would report now."""
        self._advance()
        now_s = self.env.now
        self._counts.append((now_s, self._num_tokens))
        while self._counts[0][0] < now_s - WINDOW_S:
            self._counts.popleft()
        while self._first_tokens and self._first_tokens[0][0] < now_s - FIRST_TOKEN_WINDOW_S:
            self._first_tokens.popleft()
        return Activity(
            num_waiting=len(self._queue),
            tokens_per_s=(self._num_tokens - self._counts[0][1]) / WINDOW_S,
            tokens_per_turn=self.speed.tokens_per_turn,
            first_token_s=percentile([first_s for _, first_s in self._first_tokens]),
        )

    def add(self, job: Job) -> None:
        """Takes a job; its prompt and what it has so far are computed again."""
        self._advance()
        job.arrived_s = self.env.now
        job.work = self.speed.prompt_share * (job.arrival.num_prompt_tokens + job.done)
        self._queue.append(job)
        self._wake()

    def take_all(self) -> list[Job]:
        """Returns all jobs, which continue in another pipeline."""
        self._advance()
        jobs = self._running + self._queue
        self._running, self._queue = [], []
        self._wake()
        return jobs

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Serves for ever, as a process of the simulation."""
        self._since_s = self.env.now
        self._counts.append((self.env.now, self._num_tokens))
        while True:
            while self._queue and len(self._running) < self.speed.max_running:
                self._running.append(self._queue.pop(0))
            self._change = self.env.event()
            awaited: list[simpy.Event] = [self._change]
            if self._running:
                awaited.append(self.env.timeout(self._next_s()))
            yield simpy.AnyOf(self.env, awaited)
            self._advance()

    def _wake(self) -> None:
        if self._change is not None and not self._change.triggered:
            self._change.succeed()

    def _rate(self) -> float:
        """Returns the tokens per second of one running job."""
        return self.speed.tokens_per_s(len(self._running)) / len(self._running)

    def _next_s(self) -> float:
        """Returns the time to the next first token or end."""
        least = min(_left(job) for job in self._running)
        return max(least, 0.0) / self._rate() + 1e-6

    def _advance(self) -> None:
        elapsed_s, self._since_s = self.env.now - self._since_s, self.env.now
        if not self._running or elapsed_s <= 0.0:
            return
        gain = elapsed_s * self._rate()
        for job in self._running:
            computed = min(gain, job.work)
            job.work -= computed
            generated = min(gain - computed, job.arrival.num_tokens - job.done)
            job.done += generated
            self._num_tokens += generated
            if job.first_token_s is None and job.done >= 1.0 - _LEFT:
                job.first_token_s = self.env.now
                self._first_tokens.append((self.env.now, self.env.now - job.arrived_s))
        over = [job for job in self._running if job.is_over]
        self._running = [job for job in self._running if not job.is_over]
        for job in over:
            self.ended(job)


def _left(job: Job) -> float:
    """Returns the work to a job's first token, or to its end."""
    until = 1.0 if job.first_token_s is None else float(job.arrival.num_tokens)
    return job.work + until - job.done
