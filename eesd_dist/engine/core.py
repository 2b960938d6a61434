"""The round loop of one pipeline: plan, draft, send, receive, commit, observe.

It lives in one thread, the drafting actor's or a library user's; requests come in and are aborted
from any other. It owns the order of things and nothing else: the scheduler decides who runs, the
controllers how far to draft, the verify stage which tokens leave.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.calibrator import Calibrator
from eesd_dist.control.cost import CostModel
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.control.taking_turns import TakingTurns
from eesd_dist.engine.draft import DraftedRound, DraftRun, DraftStage
from eesd_dist.engine.loop_clock import LoopClock, Unnamed
from eesd_dist.engine.spool import SpoolSink, SpoolTap
from eesd_dist.errors import ConfigError, RequestError
from eesd_dist.model.exit_head import ExitHead
from eesd_dist.routing.beliefs import BeliefBook, DraftPlan
from eesd_dist.schedule.lending import LentPages, PageLanding, PageLoan
from eesd_dist.schedule.scheduler import Committed, PlanItem, RoundPlan, Scheduler
from eesd_dist.telemetry.tracing import NO_IDS, SpanIds
from eesd_dist.transport.contracts import RoundHeader, Segment, VerifyChannel, VerifyReply
from eesd_dist.trees import ROOT
from eesd_dist.types import (
    NO_TRAFFIC,
    Branch,
    Emission,
    Outcome,
    Request,
    RequestId,
    RoundStats,
    TokenId,
    TokenLogprobs,
    Traffic,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one turn of the loop brought."""

    emissions: tuple[Emission, ...] = ()
    rounds: tuple[RoundStats, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    finished: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    num_running: int
    num_waiting: int
    free_pages: int
    num_pages: int
    num_preemptions: int = 0
    """Since the engine was built."""


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A round between its sending and its verdict."""

    plan: RoundPlan
    drafted: DraftedRound
    round_id: int
    started_unix_s: float
    plan_s: float
    draft_s: float
    sent_at: float
    send_s: float
    ahead_s: float
    sent_bytes: int
    span: SpanIds


class EngineCore:
    """One pipeline's engine. `step` belongs to one thread; `add` and `abort` to any."""

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
        generation: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        round_span: Callable[[Sequence[str | None]], SpanIds] = lambda _: NO_IDS,
        spool: SpoolSink | None = None,
        draft_traffic: Callable[[], Traffic] = lambda: NO_TRAFFIC,
        turns: TakingTurns | None = None,
    ) -> None:
        """`turns`: chooses between one cohort and two; None leaves it to the scheduler.
        `round_span`: from the traceparents of a round's requests to the span it will have.
        `draft_traffic`: what this rank has exchanged with the other draft ranks so far."""
        self._draft = draft
        self._channel = channel
        self._scheduler = scheduler
        self._speculation = speculation
        self._cost = cost
        self._turns = turns
        self._book = book
        self._generation = generation
        self._clock = clock
        self._round_span = round_span
        self._draft_traffic = draft_traffic
        self._draft_traffic_before = draft_traffic()
        self._loop_clock = LoopClock(now_s=clock())
        self._last_reply_at = clock()
        self._tap = SpoolTap(spool) if spool is not None else None
        self._next_head: tuple[ExitHead, Calibrator] | None = None
        self._lock = threading.Lock()
        self._arrived = threading.Event()
        self._policy = DraftPolicy(speculation=speculation, cost=cost, calibrator=calibrator)
        self._in_flight: dict[int, _InFlight] = {}
        self._returning: dict[RequestId, tuple[Request, DraftPlan | None]] = {}
        """Waiting requests whose id an aborted one in flight still has: admitted when it leaves."""
        self._kv_moves: list[tuple[int, int]] = []
        """Slots of accepted branches that the verify stage has yet to move: the next header says
        so, before anything is read or written there, whoever's round that is."""
        self._moves_sent: dict[int, tuple[tuple[int, int], ...]] = {}
        """Those in headers whose replies have not come yet, by round."""
        self._next_cohort = 0
        self._round_id = 0
        self._broken_by: Exception | None = None
        """What ended the last turn after its tokens were committed; the next turn raises it."""

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def draft_stage(self) -> DraftStage:
        return self._draft

    @property
    def cost(self) -> CostModel | None:
        """What a draft step and a verify pass were measured to cost; None without an exit head."""
        return self._cost

    def add(self, request: Request, plan: DraftPlan | None = None) -> None:
        """Queues a request; `plan` is the router's advice on how to draft for it.

        Raises RequestError when it can never be served and CapacityError when the queue is full.
        """
        self._refuse_odd_tree(request)
        with self._lock:
            self._policy.check(request.speculation.controller)
            before = self._scheduler.live(request.request_id)
            self._scheduler.add(request)
            if before is None:
                self._admit(request, plan)
            else:  # aborted, and its round still goes by this id
                self._returning[request.request_id] = request, plan
        self._arrived.set()

    def abort(self, request_id: RequestId) -> None:
        """Drops a request and frees its pages; unknown ids are ignored (it may just have ended)."""
        with self._lock:
            self._scheduler.abort(request_id)
            self._returning.pop(request_id, None)
            if self._scheduler.live(request_id) is None:
                self._let_go(request_id)
        self._arrived.set()

    def apply_plans(self, plans: Mapping[RequestId, DraftPlan]) -> None:
        """Takes the router's beliefs where they know more than this engine's own."""
        with self._lock:
            self._policy.advise({request_id: plan.belief for request_id, plan in plans.items()})

    def swap_head(self, head: ExitHead, calibrator: Calibrator) -> None:
        """Another exit head drafts from the next round on; any thread may ask. No text changes.

        Raises ConfigError for one that reads other rows than the head it takes the place of.
        """
        mine = self._draft.head
        if mine is None or (mine.exit_layer, mine.reads_embedding) != (
            head.exit_layer,
            head.reads_embedding,
        ):
            raise ConfigError(
                f"an exit head after layer {head.exit_layer} (reads_embedding "
                f"{head.reads_embedding}) cannot take the place of this engine's: build a new one"
            )
        with self._lock:
            self._next_head = (head, calibrator)
        self._arrived.set()

    def load(self) -> EngineLoad:
        with self._lock:
            usage = self._scheduler.usage()
        return EngineLoad(
            num_running=usage.num_running,
            num_waiting=usage.num_waiting,
            free_pages=usage.num_free_pages,
            num_pages=usage.num_pages,
            num_preemptions=usage.num_preemptions,
        )

    def check(self) -> None:
        """Raises AssertionError where page tables and the allocator disagree."""
        with self._lock:
            self._scheduler.check()

    # -- pages of other pipelines; from any thread -----------------------------------------------

    def lend_pages(self, request_ids: Collection[RequestId] | None) -> PageLoan:
        """Full pages of live requests (None: of all) stay as they are until they are returned.

        The requests go on meanwhile: their rounds write behind these pages.
        """
        with self._lock:
            return self._scheduler.lend(request_ids, untouchable=self._moving_pages())

    def return_pages(self, number: str) -> bool:
        """Whether the loan's pages held the same all the while."""
        with self._lock:
            return self._scheduler.lending.take_back(number)

    def reserve_pages(self, lent: Sequence[LentPages]) -> PageLanding:
        """Pages that no round reads or writes until they are adopted or abandoned."""
        with self._lock:
            return self._scheduler.reserve(
                lent, untouchable=self._moving_pages(), generation=self._generation
            )

    def adopt_pages(self, number: str) -> bool:
        """Their content is there: who is added from now on finds it. False: nothing was adopted,
        since the stores have been lost meanwhile."""
        with self._lock:
            return self._scheduler.lending.adopt(number)

    def abandon_pages(self, number: str) -> None:
        """Nobody writes into them any more, and nothing of it is to be found."""
        with self._lock:
            self._scheduler.lending.abandon(number)

    def _moving_pages(self) -> set[int]:
        """Pages that the verify stage has yet to move slots in: an accepted branch is not in its
        place there, or lies in a page that its request has given back already."""
        moves = [*self._kv_moves, *(move for sent in self._moves_sent.values() for move in sent)]
        return {slot // self._draft.page_size for move in moves for slot in move}

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_work()

    def step(self, *, wait_s: float = 0.05) -> StepResult:
        """One turn: take the oldest verdict of a cohort, then draft that cohort's next round.

        While cohort A is drafted here, cohort B is verified over there. With nothing to do it
        waits up to `wait_s` for a request. Raises PeerLost when the verify stage is gone, or a rank
        of the draft stage: call `attach` with a new channel, and every live request is computed
        again from its tokens.
        """
        if self._broken_by is not None:
            raise self._broken_by
        self._take_next_head()
        self._choose_turns()
        count = self._scheduler.num_cohorts
        for offset in range(count):
            cohort = (self._next_cohort + offset) % count
            waiting = self._in_flight.get(cohort)
            if waiting is None:
                result, has_begun = StepResult(), self._begin(cohort)
            else:
                result, has_begun = self._finish(waiting), self._begin_or_break(cohort)
            if has_begun or waiting is not None:
                self._next_cohort = (cohort + 1) % count
                return result
        idle_from = self._clock()
        self._arrived.wait(wait_s)
        self._arrived.clear()
        self._loop_clock.idled(self._clock() - idle_from)
        return StepResult()

    def _choose_turns(self) -> None:
        if self._turns is not None:
            with self._lock:
                self._scheduler.take_turns(self._turns.pays(self._scheduler.num_running))

    def _begin_or_break(self, cohort: int) -> bool:
        """Tokens that were just committed leave, whatever happens here: it is raised next time."""
        try:
            return self._begin(cohort)
        except Exception as error:  # nothing is swallowed: it is only late
            self._broken_by = error
            return False

    def attach(self, channel: VerifyChannel, *, generation: int) -> None:
        """Goes on with a new verify stage: nothing of its cache is known, so all is recomputed."""
        with self._lock:
            self._broken_by = None
            self._in_flight.clear()
            self._kv_moves.clear()
            self._moves_sent.clear()
            self._scheduler.reset_computed()
            self._draft.forget_all()
            for request_id in self._policy.live():
                self._settle_end(request_id)  # of those aborted while in flight
            self._channel = channel
            self._generation = generation
            self._draft_traffic_before = self._draft_traffic()

    def close(self) -> None:
        self._channel.close()
        self._draft.close()

    def _take_next_head(self) -> None:
        """Between two rounds: what prefixes the old head has seen is nothing to the new one."""
        with self._lock:
            waiting, self._next_head = self._next_head, None
            if waiting is None:
                return
            self._policy.recalibrate(waiting[1])
            self._scheduler.change_drafter()
            self._draft.swap_head(waiting[0])  # last: a lost rank may end it, and the head is here

    # -- one turn -------------------------------------------------------------------------------

    def _begin(self, cohort: int) -> bool:
        """Plans, drafts and sends; False when the cohort has nothing to do."""
        started_unix_s, started = time.time(), self._clock()
        with self._lock:
            plan = self._scheduler.plan(cohort)
            # Who is in no round may lose pages before its next one; in flight, nobody does.
            rounds = [plan, *(waiting.plan for waiting in self._in_flight.values())]
            self._draft.drop_ahead(
                keep={
                    item.live.request.request_id
                    for round_plan in rounds
                    if round_plan is not None
                    for item in round_plan.items
                }
            )
            if plan is None:
                return False
            for request_id in plan.preempted:
                self._draft.forget(request_id)
        planned = self._clock()
        drafted = self._draft.draft(plan, self._policy, overlapped=bool(self._in_flight))
        drafted_at = self._clock()
        header = self._header(plan, drafted)
        sent_bytes = self._channel.send(header, drafted.hidden_TD, drafted.draft_probs_KV)
        sent = self._clock()
        waiting = self._in_flight[cohort] = _InFlight(
            plan=plan,
            drafted=drafted,
            round_id=header.round_id,
            started_unix_s=started_unix_s,
            plan_s=planned - started,
            draft_s=drafted_at - planned,
            sent_at=drafted_at,
            send_s=sent - drafted_at,
            ahead_s=0.0,
            sent_bytes=sent_bytes,
            span=SpanIds(trace_id=header.trace_id, span_id=header.span_id),
        )
        if self._speculation.draft_ahead and len(self._in_flight) == 1:
            self._go_ahead(waiting)
            waiting.ahead_s = self._clock() - sent
        self._loop_clock.spent(sent - started + waiting.ahead_s)
        return True

    def _go_ahead(self, waiting: _InFlight) -> None:
        """With nobody else to draft for, guess on past the draft until the verdict is here."""
        while not self._channel.reply_is_here():
            runs = self._draft.ahead_room(waiting.drafted.runs)
            if len(runs) != 1:
                break
            (run,) = runs
            if run.is_tree:  # its verdict may fall on any branch
                break
            if len(run.state.ahead) > run.item.max_draft:
                break
            with_evidence = self._policy.needs_evidence([run.request_id])
            self._draft.go_ahead(run, with_evidence=with_evidence)

    def _finish(self, waiting: _InFlight) -> StepResult:
        wait_from = self._clock()
        reply = self._channel.receive()
        self._draft.check()  # nothing that was computed with a rank since lost may leave
        received = self._clock()
        del self._in_flight[waiting.plan.cohort]
        with self._lock:
            self._moves_sent.pop(waiting.round_id, None)
        results, outcomes = self._judge(waiting, reply)
        with self._lock:
            emissions = self._scheduler.commit(waiting.plan, results)
            if self._tap is not None:
                for emission in emissions:
                    self._tap.commit(emission.request_id, len(emission.tokens))
            finished = [e.request_id for e in emissions if e.finish_reason is not None]
            self._policy.observe(outcomes)
            if self._turns is not None:
                self._turns.observe(
                    num_drafted=sum(outcome.num_drafted for outcome in outcomes),
                    num_requests=len(results),
                )
            if self._book is not None and self._speculation.learn:
                self._book.observe(outcomes)
            for item in waiting.plan.items:
                self._settle_end(item.live.request.request_id)
        committed = self._clock()
        self._loop_clock.spent(committed - wait_from)
        stats = self._stats(
            waiting,
            reply,
            outcomes,
            num_emitted=sum(len(e.tokens) for e in emissions),
            queued_s=max(self._last_reply_at - waiting.sent_at, 0.0),
            in_flight_s=received - waiting.sent_at,
            blocked_s=received - wait_from,
            commit_s=committed - received,
            unnamed=self._loop_clock.verdict(now_s=committed),
        )
        self._last_reply_at = received
        return StepResult(
            emissions=tuple(emissions),
            rounds=(stats,),
            outcomes=tuple(outcomes),
            finished=tuple(finished),
        )

    def _judge(
        self, waiting: _InFlight, reply: VerifyReply
    ) -> tuple[dict[RequestId, Committed], list[Outcome]]:
        """Holds each draft against the verifier's tokens: the longest agreeing branch survives."""
        assert reply.round_id == waiting.round_id
        results: dict[RequestId, Committed] = {}
        outcomes: list[Outcome] = []
        moves: list[tuple[int, int]] = []
        tokens: list[int] = reply.tokens.tolist()
        at = 0
        for run in waiting.drafted.runs:
            item = run.item
            request_id = item.live.request.request_id
            if not item.is_final:
                self._draft.settle(run, path=(), next_token=-1)
                continue
            k = len(run.tokens)
            chosen = tokens[at : at + k + 1]
            path = _accepted(run, chosen, reply.accepted[at : at + k].tolist())
            rows = [0, *(1 + node for node in path)]
            moves += self._draft.settle(run, path=path, next_token=chosen[rows[-1]])
            if self._tap is not None:
                self._tap.stage(run, reply, first=at, path=path)
            results[request_id] = Committed(
                tokens=tuple(TokenId(chosen[row]) for row in rows),
                num_drafted=k,
                num_accepted=len(path),
                logprobs=_logprobs(item, reply, [at + row for row in rows]),
            )
            if item.live.request.speculation.mode == "auto":
                outcomes.append(_outcome(run, path))
            at += k + 1
        self._draft.move(moves)
        with self._lock:
            self._kv_moves += moves
        return results, outcomes

    # -- pieces ---------------------------------------------------------------------------------

    def _refuse_odd_tree(self, request: Request) -> None:
        shape = self._speculation.tree.shape_of(request.speculation.tree)
        if shape != "none" and self._speculation.acceptance == "rejection":
            raise RequestError(
                f"speculation.tree is {shape} and this service accepts by rejection sampling, "
                "which judges chains: leave it out, or ask for none",
                param="speculation.tree",
            )

    def _header(self, plan: RoundPlan, drafted: DraftedRound) -> RoundHeader:
        self._round_id += 1
        with self._lock:
            moves, self._kv_moves = tuple(self._kv_moves), []
            if moves:
                self._moves_sent[self._round_id] = moves
        span = self._round_span([item.live.request.traceparent for item in plan.items])
        return RoundHeader(
            generation=self._generation,
            round_id=self._round_id,
            segments=tuple(
                _segment(run, self._draft.page_size, spool_k=self._spool_k(run))
                for run in drafted.runs
            ),
            trace_id=span.trace_id,
            span_id=span.span_id,
            wants_rejection=self._speculation.acceptance == "rejection",
            kv_moves=moves,
        )

    def _spool_k(self, run: DraftRun) -> int:
        return 0 if self._tap is None else self._tap.top_k(run.request_id)

    def _admit(self, request: Request, plan: DraftPlan | None) -> None:
        if plan is None and self._book is not None:
            plan = self._book.admit(request.request_id, request.workload)
        self._policy.admit(
            request.request_id,
            request.speculation.controller,
            plan.belief if plan is not None else Belief(),
        )
        if self._tap is not None:
            self._tap.admit(request)

    def _settle_end(self, request_id: RequestId) -> None:
        """Lets a request go that has left, and in whoever has waited for its id."""
        returning = self._returning.pop(request_id, None)
        if returning is not None or self._scheduler.live(request_id) is None:
            self._let_go(request_id)
        if returning is not None:
            self._admit(*returning)

    def _let_go(self, request_id: RequestId) -> None:
        if self._tap is not None:
            self._tap.end(request_id)
        self._draft.forget(request_id)
        self._policy.forget(request_id)
        if self._book is not None:
            self._book.finish(request_id)

    def _stats(
        self,
        waiting: _InFlight,
        reply: VerifyReply,
        outcomes: list[Outcome],
        *,
        num_emitted: int,
        queued_s: float,
        in_flight_s: float,
        blocked_s: float,
        commit_s: float,
        unnamed: Unnamed,
    ) -> RoundStats:
        items = waiting.plan.items
        draft_traffic = self._draft_traffic()
        draft_group = draft_traffic.since(self._draft_traffic_before)
        self._draft_traffic_before = draft_traffic
        depths = [
            max(run.depths, default=0)
            for run in waiting.drafted.runs
            if run.item.is_final and run.item.live.request.speculation.mode == "auto"
        ]
        longest = max(depths, default=0)
        return RoundStats(
            round_id=waiting.round_id,
            cohort=waiting.plan.cohort,
            num_requests=len(items),
            num_rows=waiting.drafted.hidden_TD.shape[0],
            num_prefill_rows=sum(i.num_known for i in items if i.num_known > 1 or not i.is_final),
            num_drafted=sum(o.num_drafted for o in outcomes),
            num_accepted=sum(o.num_accepted for o in outcomes),
            num_emitted=num_emitted,
            plan_s=waiting.plan_s,
            draft_s=waiting.draft_s,
            transfer_s=max(0.0, min(in_flight_s - queued_s - reply.received_to_sent_s, blocked_s)),
            queued_s=queued_s,
            verify_s=reply.verify_s,
            commit_s=commit_s,
            started_unix_s=waiting.started_unix_s,
            sent_bytes=waiting.sent_bytes,
            received_bytes=reply.wire_bytes,
            waited_s=waiting.send_s + blocked_s,
            ahead_s=waiting.ahead_s,
            idle_s=unnamed.idle_s,
            other_s=unnamed.other_s,
            verify_group=reply.group,
            draft_group=draft_group,
            request_ids=tuple(i.live.request.request_id for i in items),
            traceparents=tuple(i.live.request.traceparent for i in items),
            trace_id=waiting.span.trace_id,
            span_id=waiting.span.span_id,
            drafted_by_position=tuple(sum(depth > j for depth in depths) for j in range(longest)),
            accepted_by_position=tuple(
                sum(o.num_accepted > j for o in outcomes) for j in range(longest)
            ),
        )


def _segment(run: DraftRun, page_size: int, *, spool_k: int = 0) -> Segment:
    item = run.item
    live, p = item.live, item.live.request.sampling
    num_rows = item.num_known + len(run.tokens)
    end = item.start + num_rows
    return Segment(
        start=item.start,
        num_rows=num_rows,
        parents=run.branching,
        num_sampled=1 + len(run.tokens) if item.is_final else 0,
        pages=tuple(item.pages[: -(-end // page_size)]),
        tokens=(*live.tokens[item.start : item.start + item.num_known], *run.tokens),
        history=tuple(live.tokens[: item.start]) if p.needs_history else (),
        num_prompt=live.num_prompt,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        min_p=p.min_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        seed=p.seed % 2**64,
        min_tokens=p.min_tokens,
        stop_token_ids=p.stop_token_ids,
        logit_bias=p.logit_bias,
        # What the spool asks for beside it never leaves: `_logprobs` goes by the request alone.
        top_logprobs=max(p.top_logprobs or 0, spool_k) if spool_k else p.top_logprobs,
    )


def _accepted(run: DraftRun, chosen: list[int], flags: list[int]) -> list[int]:
    """The drafted tokens that survive, from the root on. `chosen` are the verifier's own tokens
    after the last known row and after each drafted one; `flags`: rejection sampling has judged."""
    if flags:
        return list(range(flags.index(0) if 0 in flags else len(flags)))
    path: list[int] = []
    last = ROOT
    for node, parent in enumerate(run.parents):
        if parent == last and run.tokens[node] == chosen[1 + last]:
            path.append(node)
            last = node
    return path


def _outcome(run: DraftRun, path: list[int]) -> Outcome:
    return Outcome(
        request_id=run.request_id,
        num_drafted=len(run.tokens),
        num_accepted=len(path),
        evidence=() if run.is_tree else tuple(run.evidence),
        branches=_branches(run, path) if run.is_tree else (),
    )


def _branches(run: DraftRun, path: list[int]) -> tuple[Branch, ...]:
    """The points of a tree that its verdict came to, where there was something to judge."""
    found: list[Branch] = []
    for depth, point in enumerate((ROOT, *path)):
        children = [node for node, parent in enumerate(run.parents) if parent == point]
        if children:
            found.append(
                Branch(
                    depth=depth,
                    num_offered=len(children),
                    chosen_rank=run.ranks[path[depth]] if depth < len(path) else -1,
                    evidence=run.evidence[children[0]],
                )
            )
    return tuple(found)


def _logprobs(item: PlanItem, reply: VerifyReply, rows: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the tokens that leave; nothing when the request asked for none."""
    wanted = item.live.request.sampling.top_logprobs
    if wanted is None:
        return ()
    return tuple(
        TokenLogprobs(
            logprob=float(reply.logprobs[row]),
            top=tuple(
                (TokenId(int(i)), float(v))
                for i, v in zip(
                    reply.top_ids[row][:wanted], reply.top_logprobs[row][:wanted], strict=True
                )
            ),
        )
        for row in rows
    )
