"""The wanted number of pipelines: a pure policy.

Time is an input, and nothing is read or started here: the router and the simulation of fleets use
the same object. Each signal says how many pipelines the present load needs, as a real number:

    live     live requests / live requests aimed at for each pipeline
    queue    pipelines * live / running, while requests wait in queues of pipelines
    tokens   tokens per second / (measured capacity * utilisation aimed at)
    kv       KV pages in use, in pipelines / share aimed at
    first    pipelines * first-token time / its target

The largest counts. Up when it has been above the wanted number for `up_delay_s`, by the least it
was, at most `max_step` at once; pipelines that start count as capacity to come. Down, one at a
time, when it has been at most `shrink_at` * (wanted - 1) for `down_delay_s`, and as long after any
change. Between the two thresholds nothing changes: a load that varies by a factor of less than
1 / `shrink_at` between its extremes never leads up and down again. From zero without a delay, to
zero after `idle_delay_s` without a request.
"""

import math
from dataclasses import dataclass
from typing import Literal

from eesd_dist.checks import require_positive
from eesd_dist.errors import ConfigError
from eesd_dist.routing.activity import NO_ACTIVITY, Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoad:
    """Load of one pipeline."""

    num_live: int = 0
    """Requests that it serves, those in its queue included."""
    activity: Activity = NO_ACTIVITY
    max_tokens_per_s: float | None = None
    """Measured capacity at the target of live requests; None where nothing was measured."""
    is_serving: bool = True
    """It is ready and takes requests. False: it starts, is draining or unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """Load of all pipelines of a service."""

    pipelines: tuple[PipelineLoad, ...] = ()
    num_waiting: int = 0
    """Requests at ingresses for which no pipeline is ready."""

    @property
    def num_live(self) -> int:
        """Requests at pipelines and ingresses."""
        return self.num_waiting + sum(pipeline.num_live for pipeline in self.pipelines)

    @property
    def num_queued(self) -> int:
        """Requests among these that are in the queues of pipelines."""
        return sum(pipeline.activity.num_waiting for pipeline in self.pipelines)

    @property
    def serving(self) -> tuple[PipelineLoad, ...]:
        return tuple(pipeline for pipeline in self.pipelines if pipeline.is_serving)


Signal = Literal["live", "queue", "tokens", "kv", "first", "idle", "bounds", "start"]

_MOST = 2.0
"""Greatest factor by which queues or first tokens may multiply the pipelines: they say that there
are too few, but not how many are missing."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTargets:
    """Targets of the policy, and how fast it acts."""

    min_count: int = 1
    max_count: int = 1
    live_requests: float = 16.0
    """Live requests for each pipeline."""
    utilisation: float = 0.85
    """Share of the measured tokens per second of a pipeline."""
    kv_use: float = 0.85
    """Share of the KV pages of a pipeline."""
    first_token_s: float | None = None
    """90th percentile of the time to the first token; None: it is no signal."""
    shrink_at: float = 0.7
    """A pipeline is given up when the others would be loaded to this share of the targets."""
    up_delay_s: float = 10.0
    down_delay_s: float = 120.0
    idle_delay_s: float = 600.0
    """Time without a request after which the last pipeline is given up, with a min_count of 0."""
    max_step: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.min_count <= self.max_count or min(self.max_count, self.max_step) < 1:
            raise ConfigError(
                f"found min_count {self.min_count}, max_count {self.max_count} and max_step "
                f"{self.max_step}: expected 0 <= min_count <= max_count, max_count and max_step "
                "from 1"
            )
        require_positive(self, "live_requests", "utilisation", "kv_use", "first_token_s")
        for name in ("up_delay_s", "down_delay_s", "idle_delay_s"):
            if not (delay_s := getattr(self, name)) >= 0.0:
                raise ConfigError(f"found {name} {delay_s:g}: expected 0 or more")
        if not 0.0 < self.shrink_at < 1.0:
            raise ConfigError(f"found shrink_at {self.shrink_at:g}: expected a share below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Number of pipelines that a load needs, by the signal that needs most."""

    count: float
    signal: Signal
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """The wanted number, and why it is so."""

    target: int
    signal: Signal
    reason: str
    since_s: float
    """Time of the decision, on the clock of the caller."""


class FleetSize:
    """Decides the number of pipelines of one service."""

    def __init__(self, targets: FleetTargets, *, count: int, time_s: float) -> None:
        """`count` is the number at the beginning."""
        self.targets = targets
        self._decision = FleetDecision(
            target=count, signal="start", reason=f"{count} at the start", since_s=time_s
        )
        self._above_since_s: float | None = None
        """Time since which the load has needed more; None while it does not."""
        self._least_above = 0
        """The least number it has needed since then."""
        self._below_since_s: float | None = None
        """Time since which one pipeline fewer would do; None while it would not."""

    @property
    def decision(self) -> FleetDecision:
        """The latest change."""
        return self._decision

    def look(self, load: FleetLoad, *, time_s: float) -> FleetDecision:
        """Decides on the present load; to be called about once a second, with a growing time."""
        need = need_of(load, self.targets)
        if (bounded := self._bounded(self._decision.target)) != self._decision.target:
            self._decide(bounded, "bounds", "min_count and max_count", time_s=time_s)
        self._grow(need, time_s=time_s)
        self._shrink(need, load, time_s=time_s)
        return self._decision

    def _grow(self, need: Need, *, time_s: float) -> None:
        current = self._decision.target
        required = self._bounded(math.ceil(need.count - _ROUNDING))
        if required <= current:
            self._above_since_s = None
            return
        if self._above_since_s is None:
            self._above_since_s, self._least_above = time_s, required
        self._least_above = min(self._least_above, required)
        lasted_s = time_s - self._above_since_s
        if current == 0 or lasted_s >= self.targets.up_delay_s:
            to = min(self._least_above, current + self.targets.max_step)
            text = f"{need.text}, which needs {need.count:.2f}, for {lasted_s:.0f} s"
            self._decide(to, need.signal, text, time_s=time_s)

    def _shrink(self, need: Need, load: FleetLoad, *, time_s: float) -> None:
        current, targets = self._decision.target, self.targets
        if current <= targets.min_count or not self._would_do(need, load):
            self._below_since_s = None
            return
        if self._below_since_s is None:
            self._below_since_s = time_s
        since_s = max(self._below_since_s, self._decision.since_s)
        delay_s = targets.down_delay_s if current > 1 else targets.idle_delay_s
        if time_s - since_s >= delay_s:
            text = f"{need.text}, which needs {need.count:.2f}, for {time_s - since_s:.0f} s"
            self._decide(current - 1, need.signal, text, time_s=time_s)

    def _would_do(self, need: Need, load: FleetLoad) -> bool:
        """Returns whether one pipeline fewer is enough for the load."""
        fewer = self._decision.target - 1
        if fewer == 0:
            return load.num_live == 0
        return need.count <= self.targets.shrink_at * fewer

    def _decide(self, to: int, signal: Signal, text: str, *, time_s: float) -> None:
        was = self._decision.target
        direction = "up" if to > was else "down"
        self._decision = FleetDecision(
            target=to,
            signal=signal,
            reason=f"{direction} from {was} to {to}: {text}",
            since_s=time_s,
        )
        self._above_since_s = self._below_since_s = None

    def _bounded(self, count: int) -> int:
        return min(max(count, self.targets.min_count), self.targets.max_count)


def need_of(load: FleetLoad, targets: FleetTargets) -> Need:
    """Returns how many pipelines the load needs, and the signal that says so: none without live
    requests, whatever was measured before they ended."""
    if not load.num_live:
        return Need(count=0.0, signal="idle", text="no live request")
    return max(_needs(load, targets), key=lambda need: need.count)


def _needs(load: FleetLoad, targets: FleetTargets) -> list[Need]:
    live, queued, serving = load.num_live, load.num_queued, load.serving
    text = f"{live} live requests at {targets.live_requests:g} for each pipeline"
    needs = [Need(count=live / targets.live_requests, signal="live", text=text)]
    if load.num_waiting and not serving:
        text = f"{load.num_waiting} requests wait and no pipeline is ready"
        needs[0] = Need(count=needs[0].count, signal="queue", text=text)
    if queued and serving:
        running = max(live - load.num_waiting - queued, 1)
        factor = min((running + queued) / running, _MOST)
        text = f"{queued} requests wait in queues of pipelines, beside {running} that run"
        needs.append(Need(count=len(serving) * factor, signal="queue", text=text))
    used = sum(pipeline.activity.kv_use for pipeline in load.pipelines)
    if used:
        text = f"KV pages of {used:.2f} pipelines in use at {targets.kv_use:g} for each"
        needs.append(Need(count=used / targets.kv_use, signal="kv", text=text))
    return [*needs, *_speed_needs(load, targets)]


def _speed_needs(load: FleetLoad, targets: FleetTargets) -> list[Need]:
    needs, serving = [], load.serving
    measured = [p.max_tokens_per_s for p in serving if p.max_tokens_per_s]
    rate = sum(pipeline.activity.tokens_per_s for pipeline in load.pipelines)
    if measured:
        usable = targets.utilisation * sum(measured) / len(measured)
        text = f"{rate:.0f} tokens/s at {usable:.0f} of each pipeline's measured capacity"
        needs.append(Need(count=rate / usable, signal="tokens", text=text))
    slowest = [p.activity.first_token_s for p in serving if p.activity.first_token_s is not None]
    if slowest and targets.first_token_s is not None:
        first_s = max(slowest)
        factor = min(first_s / targets.first_token_s, _MOST)
        text = f"first tokens after {first_s:.2f} s, {targets.first_token_s:g} s aimed at"
        needs.append(Need(count=len(serving) * factor, signal="first", text=text))
    return needs
