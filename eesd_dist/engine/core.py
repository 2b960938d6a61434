"""The round loop of one pipeline: plan, draft, send, receive, judge, commit, observe.

It runs in one thread, the drafting actor's or a library user's; requests are added and aborted from
any thread. It owns the order of operations only: the scheduler decides which requests run, the
controllers how far to draft, the verify stage which tokens are emitted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.learnt_cost import RoundCost
from eesd_dist.control.overlap_policy import OverlapPolicy
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.acceptance import Accepted, PromptLogprobs, accepted_drafts
from eesd_dist.engine.drafting.stage import DraftStage
from eesd_dist.engine.head_exchange import HeadExchange
from eesd_dist.engine.headers import HeaderWriter, KvMoves, TraceRound
from eesd_dist.engine.kv_sharing import KvSharing
from eesd_dist.engine.masks import Masks
from eesd_dist.engine.recording.recorder import RecorderSink, RecorderTap
from eesd_dist.engine.recording.text_features import FeatureLimits, FeatureTap, TextFeatures
from eesd_dist.engine.requests import EngineLoad, EngineRequests
from eesd_dist.engine.round_stats import RoundInFlight, RoundMeter
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.layers.captures import CAPTURES
from eesd_dist.routing.beliefs import BeliefBook, DraftPlan
from eesd_dist.schedule.plans import RoundPlan
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.transport.contracts import VerifyChannel, VerifyReply
from eesd_dist.types import (
    NO_TRAFFIC,
    Emission,
    Outcome,
    Request,
    RequestId,
    RoundStats,
    Traffic,
)

_MASK_WAIT_S = 0.05
"""A turn in which every request waits for its mask lasts so long, or until one is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of one turn of the loop."""

    emissions: tuple[Emission, ...] = ()
    rounds: tuple[RoundStats, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    features: tuple[TextFeatures, ...] = ()
    """Features of the texts that have ended in this turn, where they were asked for."""
    awaits_masks: bool = False
    """True if nothing could run, and masks are being made in threads."""

    @property
    def finished(self) -> tuple[RequestId, ...]:
        return tuple(e.request_id for e in self.emissions if e.finish_reason is not None)


class EngineCore:
    """Engine of one pipeline. `step` runs in one thread; `add` and `abort` in any."""

    def __init__(
        self,
        *,
        draft: DraftStage,
        channel: VerifyChannel,
        scheduler: Scheduler,
        speculation: SpeculationConfig,
        cost: CostModel | None = None,
        calibrator: Calibrator | None = None,
        book: BeliefBook | None = None,
        epoch: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        trace_round: TraceRound | None = None,
        recorder: RecorderSink | None = None,
        draft_traffic: Callable[[], Traffic] = lambda: NO_TRAFFIC,
        overlap_policy: OverlapPolicy | None = None,
        masks: Masks | None = None,
    ) -> None:
        """`overlap_policy`: chooses between one microbatch and two; None leaves it to the
        scheduler. `trace_round`: None without tracing. `draft_traffic`: total traffic of this
        rank with the other draft ranks so far. `masks`: None refuses requests with a grammar."""
        self._draft = draft
        self._channel = channel
        self._scheduler = scheduler
        self._overlap_policy = overlap_policy
        self._policy = DraftPolicy(speculation=speculation, cost=cost, calibrator=calibrator)
        self._recorder = None if recorder is None else RecorderTap(recorder)
        self._features = FeatureTap(_feature_limits(draft))
        self._prompts = PromptLogprobs()
        self._meter = RoundMeter(clock=clock, draft_traffic=draft_traffic)
        self.masks = masks or Masks(grammars=None, vocab_size=draft.span.spec.vocab_size)
        self._requests = EngineRequests(
            scheduler=scheduler,
            policy=self._policy,
            draft=draft,
            recorder=self._recorder,
            features=self._features,
            prompts=self._prompts,
            book=book,
            speculation=speculation,
            masks=self.masks,
        )
        self.masks.wake = self._requests.wake
        self._heads = HeadExchange(draft=draft, policy=self._policy, scheduler=scheduler)
        moves = KvMoves()
        self._headers = HeaderWriter(
            epoch=epoch,
            moves=moves,
            page_size=draft.page_size,
            by_rejection=speculation.acceptance == "rejection",
            trace_round=trace_round,
            recorder=self._recorder,
            features=self._features,
        )
        self.kv_sharing = KvSharing(
            scheduler=scheduler,
            moves=moves,
            page_size=draft.page_size,
            lock=self._requests.lock,
            epoch=lambda: self.epoch,
        )
        """KV page access for other pipelines, from any thread."""
        self._in_flight: dict[int, RoundInFlight] = {}
        self._next_microbatch = 0
        self._num_captures = CAPTURES.count
        """Captures of graphs before the round."""
        self._broken_by: Exception | None = None
        """Error of the last turn after its tokens were committed; the next turn raises it."""

    @property
    def epoch(self) -> int:
        return self._headers.epoch

    @property
    def draft_stage(self) -> DraftStage:
        return self._draft

    @property
    def cost(self) -> CostModel | None:
        """Cost of draft steps and verify passes as measured at start; None without an exit head."""
        return self._policy.profile

    @property
    def learnt_cost(self) -> CostModel | None:
        """The same, corrected by rounds, for the size and context of the latest one."""
        return self._policy.cost

    def add(self, request: Request, plan: DraftPlan | None = None) -> None:
        """Queues a request; `plan` is the router's advice on how to draft for it.

        Raises RequestError if it can never be served and CapacityError if the queue is full.
        """
        self._requests.add(request, plan)

    def abort(self, request_id: RequestId) -> None:
        """Drops a request and frees its pages; unknown ids are ignored (it may just have ended)."""
        self._requests.abort(request_id)

    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None:
        """Passes the router's beliefs to the controllers; those with more rounds are taken over."""
        self._requests.advise(plans)

    def swap_head(self, head: ExitHead, calibrator: Calibrator) -> None:
        """Drafts with another exit head from the next round on; from any thread. No text changes.

        Raises ConfigError for a head with another exit layer than the present one.
        """
        self._heads.check(head)
        with self._requests.lock:
            self._heads.offer(head, calibrator)
        self._requests.wake()

    def load(self) -> EngineLoad:
        return self._requests.load()

    def check(self) -> None:
        """Raises AssertionError if page tables and the allocator disagree."""
        with self._requests.lock:
            self._scheduler.check()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_work()

    def attach(self, channel: VerifyChannel, *, epoch: int) -> None:
        """Continues with a new verify stage, in which no page is valid: all KV is recomputed."""
        with self._requests.lock:
            self._broken_by = None
            self._in_flight.clear()
            self._scheduler.reset_computed()
            self._draft.forget_all()
            self._requests.stages_lost()
            self._headers.attach(epoch)
            self._channel = channel
            self._meter.stages_changed()

    def close(self) -> None:
        self._channel.close()
        self._draft.close()
        self.masks.close()

    def step(self, *, wait_s: float = 0.05) -> StepResult:
        """Runs one turn: receives the oldest verdict, then drafts the next round of its microbatch.

        While microbatch A is drafted here, microbatch B is in the verify stage. Without work it
        waits up to `wait_s` for a request. Raises PeerLost when the verify stage or a rank of the
        draft stage is lost: call `attach` with a new channel, and every live request is recomputed
        from its tokens.
        """
        if self._broken_by is not None:
            raise self._broken_by
        with self._requests.lock:
            self._heads.take()
            if self._overlap_policy is not None:
                self._scheduler.set_overlap(self._overlap_policy.pays(self._scheduler.num_running))
        count = self._scheduler.num_microbatches
        for offset in range(count):
            microbatch = (self._next_microbatch + offset) % count
            waiting = self._in_flight.get(microbatch)
            if waiting is None:
                result, is_started = StepResult(), self._begin(microbatch)
            else:
                result, is_started = self._finish(waiting), self._begin_or_break(microbatch)
            if is_started or waiting is not None:
                self._next_microbatch = (microbatch + 1) % count
                return result
        awaits_masks = self.masks.is_waiting
        if self.masks.is_behind:
            wait_s = 0.0
        elif awaits_masks:
            wait_s = max(wait_s, _MASK_WAIT_S)
        with self._meter.idle():
            self._requests.wait(wait_s)
        return StepResult(awaits_masks=awaits_masks)

    def _begin_or_break(self, microbatch: int) -> bool:
        """Defers an error to the next turn, so that the tokens just committed are still emitted."""
        try:
            return self._begin(microbatch)
        except Exception as error:  # raised by the next turn
            self._broken_by = error
            return False

    def _begin(self, microbatch: int) -> bool:
        """Plans, drafts and sends a round; False if the microbatch has no work."""
        started_unix_s, started = time.time(), self._meter.now()
        plan = self._plan(microbatch)
        if plan is None:
            return False
        planned = self._meter.now()
        drafted = self._draft.draft(plan, self._policy, overlapped=bool(self._in_flight))
        drafted_at = self._meter.now()
        trace = self._headers.trace(plan)
        header = self._headers.write(drafted, trace)
        outgoing_bytes = self._channel.send(header, drafted.hidden_TD, drafted.draft_probs_KV)
        send_end = self._meter.now()
        self._in_flight[microbatch] = RoundInFlight(
            plan=plan,
            drafted=drafted,
            header=header,
            trace=trace,
            outgoing_bytes=outgoing_bytes,
            started_unix_s=started_unix_s,
            plan_s=planned - started,
            draft_s=drafted_at - planned,
            send_s=send_end - drafted_at,
            send_start=drafted_at,
        )
        self._meter.spent(send_end - started)
        return True

    def _plan(self, microbatch: int) -> RoundPlan | None:
        self.masks.begin_turn()
        with self._requests.lock:
            plan = self._scheduler.plan(microbatch, lacks_mask=self.masks.lacks)
            for request_id in plan.preempted if plan else ():
                self._draft.forget(request_id)
        return plan

    def _finish(self, waiting: RoundInFlight) -> StepResult:
        """Receives the verdict, settles the drafts, commits and observes."""
        waiting.waited_from = self._meter.now()
        reply = self._channel.receive()
        self._draft.check()  # results computed with a rank that is lost must not be emitted
        waiting.received_at = self._meter.now()
        del self._in_flight[waiting.plan.microbatch]
        accepted = self._settle(waiting, reply)
        outcomes = [outcome for a in accepted if (outcome := a.outcome) is not None]
        with self._requests.lock:
            emissions = self._scheduler.commit(
                waiting.plan, {a.run.request_id: a.committed for a in accepted}
            )
            if self._overlap_policy is not None:
                self._overlap_policy.observe(
                    num_drafted=sum(outcome.num_drafted for outcome in outcomes),
                    num_requests=len(accepted),
                )
            emissions = self._prompts.attached(emissions)
            features = self._features.finished(emissions, waiting.drafted.runs)
            self._requests.committed(waiting.plan.items, emissions, outcomes)
        stats = self._meter.finished(waiting, reply, outcomes=outcomes, emissions=emissions)
        is_usual = self._num_captures == CAPTURES.count
        self._num_captures = CAPTURES.count
        if is_usual and not stats.num_prefill_rows:
            self._policy.observe_cost(_cost_of(stats, waiting, outcomes))
        return StepResult(
            emissions=tuple(emissions),
            rounds=(stats,),
            outcomes=tuple(outcomes),
            features=tuple(features),
        )

    def _settle(self, waiting: RoundInFlight, reply: VerifyReply) -> list[Accepted]:
        """Rolls every draft back to its accepted tokens, here and in the verify stage."""
        assert reply.round_id == waiting.header.round_id
        accepted = list(accepted_drafts(waiting.drafted.runs, waiting.header.segments, reply))
        moves = [move for a in accepted for move in self._draft.settle(a.run, path=a.path)]
        for run in waiting.drafted.runs:
            if not run.item.is_final:
                self._draft.settle(run, path=())
        if self._recorder is not None:
            self._recorder.take_prompts(waiting.drafted.runs, waiting.header, reply)
            self._recorder.stage(accepted, reply)
        self._features.take(waiting.drafted.runs, waiting.header, reply)
        self._prompts.take(waiting.drafted.runs, waiting.header, reply)
        self._draft.move(moves)
        self._headers.settle(reply.round_id, moves)
        return accepted


def _cost_of(stats: RoundStats, waiting: RoundInFlight, outcomes: Sequence[Outcome]) -> RoundCost:
    return RoundCost(
        levels=stats.drafted_by_position,
        guesses=waiting.drafted.guesses_by_depth,
        num_lookups=sum(outcome.is_lookup for outcome in outcomes),
        num_rows=stats.num_rows,
        num_requests=stats.num_requests,
        context=waiting.plan.context,
        verify_s=stats.verify_s,
        other_s=stats.plan_s + stats.draft_s + stats.transfer_s + stats.commit_s + stats.other_s,
    )


def _feature_limits(draft: DraftStage) -> FeatureLimits:
    span = draft.span
    return FeatureLimits(
        split=span.last,
        num_layers=span.spec.num_layers,
        hidden_size=span.spec.hidden_size,
        vocab_size=span.spec.vocab_size,
        dtype=span.compute_dtype,
    )
