"""Times the round loop and computes the statistics of a round.

The loop reports the time of its named parts; the rest is `other`: delivering results, waiting for
the interpreter's lock, other processes on a busy core.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from eesd_dist.engine.drafting.stage import DraftedRound
from eesd_dist.schedule.plans import RoundPlan
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.types import Emission, Outcome, RoundStats, RoundTrace, Traffic


@dataclass(slots=True, kw_only=True)
class RoundInFlight:
    """A round that was sent and has no verdict yet."""

    plan: RoundPlan
    drafted: DraftedRound
    header: RoundHeader
    trace: RoundTrace
    outgoing_bytes: int
    started_unix_s: float
    plan_s: float
    draft_s: float
    send_s: float
    send_start: float
    """Start of sending; this and the times below by the meter's clock."""
    waited_from: float = 0.0
    """Start of waiting for the verdict."""
    received_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unnamed:
    """Time since the previous verdict that no named part of a round accounts for."""

    idle_s: float
    """Time without work."""
    other_s: float


class LoopClock:
    def __init__(self, *, time_s: float) -> None:
        self._since_s = time_s
        self._accounted_s = 0.0
        self._idle_s = 0.0

    def spent(self, seconds: float) -> None:
        """Adds time that the statistics of a round name."""
        self._accounted_s += seconds

    def idled(self, seconds: float) -> None:
        self._idle_s += seconds

    def verdict(self, *, time_s: float) -> Unnamed:
        """Ends a round: returns its unnamed time, and starts the next one."""
        left_s = time_s - self._since_s - self._accounted_s - self._idle_s
        unnamed = Unnamed(idle_s=self._idle_s, other_s=max(left_s, 0.0))
        self._since_s, self._accounted_s, self._idle_s = time_s, 0.0, 0.0
        return unnamed


class RoundMeter:
    """Times the turns of one round loop and computes statistics of its rounds."""

    def __init__(self, *, clock: Callable[[], float], draft_traffic: Callable[[], Traffic]) -> None:
        """`draft_traffic`: total traffic of this rank with the other draft ranks so far."""
        self.now = clock
        self._loop = LoopClock(time_s=clock())
        self._last_reply_at = clock()
        self._draft_traffic = draft_traffic
        self._traffic_before = draft_traffic()

    def spent(self, seconds: float) -> None:
        """Adds time that the statistics of a round name."""
        self._loop.spent(seconds)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Counts the time inside as time without work."""
        idle_from = self.now()
        yield
        self._loop.idled(self.now() - idle_from)

    def stages_changed(self) -> None:
        """Restarts the traffic count: traffic between epochs belongs to no round."""
        self._traffic_before = self._draft_traffic()

    def finished(
        self,
        waiting: RoundInFlight,
        reply: VerifyReply,
        *,
        outcomes: Sequence[Outcome],
        emissions: Sequence[Emission],
    ) -> RoundStats:
        """Returns the statistics of a round just committed."""
        committed, received = self.now(), waiting.received_at
        self.spent(committed - waiting.waited_from)
        blocked_s, in_flight_s = received - waiting.waited_from, received - waiting.send_start
        queued_s = max(self._last_reply_at - waiting.send_start, 0.0)
        self._last_reply_at = received
        unnamed = self._loop.verdict(time_s=committed)
        traffic = self._draft_traffic()
        draft_group, self._traffic_before = traffic.since(self._traffic_before), traffic
        items = waiting.plan.items
        depths = [
            max(run.depths, default=0)
            for run in waiting.drafted.runs
            if run.item.is_final and run.item.live.request.speculation.mode == "auto"
        ]
        longest = max(depths, default=0)
        return RoundStats(
            round_id=waiting.header.round_id,
            microbatch=waiting.plan.microbatch,
            num_requests=len(items),
            num_rows=waiting.drafted.hidden_TD.shape[0],
            num_prefill_rows=sum(i.num_known for i in items if i.num_known > 1 or not i.is_final),
            num_drafted=sum(o.num_drafted for o in outcomes),
            num_accepted=sum(o.num_accepted for o in outcomes),
            num_lookup_drafted=sum(o.num_drafted for o in outcomes if o.is_lookup),
            num_lookup_accepted=sum(o.num_accepted for o in outcomes if o.is_lookup),
            num_emitted=sum(len(e.tokens) for e in emissions),
            plan_s=waiting.plan_s,
            draft_s=waiting.draft_s,
            transfer_s=max(0.0, min(in_flight_s - queued_s - reply.received_to_sent_s, blocked_s)),
            queued_s=queued_s,
            verify_s=reply.verify_s,
            commit_s=committed - received,
            started_unix_s=waiting.started_unix_s,
            elapsed_s=waiting.plan_s + waiting.draft_s + committed - waiting.send_start,
            sent_bytes=waiting.outgoing_bytes,
            received_bytes=reply.wire_bytes,
            waited_s=waiting.send_s + blocked_s,
            idle_s=unnamed.idle_s,
            other_s=unnamed.other_s,
            verify_group=reply.group,
            draft_group=draft_group,
            request_ids=tuple(i.live.request.request_id for i in items),
            trace=waiting.trace,
            drafted_by_position=tuple(sum(depth > j for depth in depths) for j in range(longest)),
            accepted_by_position=tuple(
                sum(o.num_accepted > j for o in outcomes) for j in range(longest)
            ),
            drafters=tuple(waiting.drafted.drafters.items()),
        )
