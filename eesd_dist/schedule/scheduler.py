"""The scheduler: which requests run in a round, with how many rows and in which pages.

Prefill chunks, decoding and drafting are the same: a request has known tokens that are not computed
yet, and room for a draft after the last of them. When pages run short, drafts shrink first; then
the youngest request is preempted. Tokens are never lost.

Independent of tensors, stages, controllers and text. Not thread-safe: one thread owns a scheduler.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import islice

from eesd_dist.config import SchedulerConfig, TreeConfig
from eesd_dist.errors import RequestError
from eesd_dist.schedule.admission import Admission
from eesd_dist.schedule.fairness import Fairness, WaitingRequests, last_to_stay
from eesd_dist.schedule.gate import Gate
from eesd_dist.schedule.live import LiveRequest
from eesd_dist.schedule.page_leases import LeasedPages, PageLease, PageLeases, PageReservation
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.schedule.plans import Committed, PlanItem, RoundPlan, SchedulerUsage
from eesd_dist.schedule.running import Microbatches, RunningRequests
from eesd_dist.types import Emission, FinishReason, Request, RequestId


class Scheduler:
    """Continuous batching over one page allocator, in one microbatch or in two that alternate."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        pages: PageAllocator,
        max_model_len: int,
        max_draft_tokens: int,
        vocab_size: int,
        clock: Callable[[], float],
        tree: TreeConfig | None = None,
    ) -> None:
        """`tree`: default shape of drafts, which a request may override; None: chains."""
        self._config = config
        self._admission = Admission(
            config=config,
            gate=Gate(
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                num_pages=pages.num_pages,
                page_size=pages.page_size,
            ),
            tree=tree or TreeConfig(),
            max_draft_tokens=max_draft_tokens,
            clock=clock,
        )
        self._clock = clock
        self._fairness = Fairness()
        self._waiting = WaitingRequests()
        self._running = RunningRequests(pages, max_running=config.max_running)
        self._microbatches = Microbatches(2 if config.overlap else 1)
        self.leases = PageLeases(pages)
        """Pages that another pipeline reads or writes."""
        self._outstanding: list[RoundPlan] = []
        self._preempted: list[RequestId] = []
        self._lacks_mask: Callable[[RequestId], bool] = lambda _: False
        self._num_turns = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0

    @property
    def num_microbatches(self) -> int:
        return self._microbatches.count

    def set_overlap(self, overlap: bool) -> None:
        """Sets whether requests go into both microbatches, or all into the first as soon as they
        are not in flight. Does nothing where there is only one."""
        self._microbatches.set_overlap(overlap)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def live(self, request_id: RequestId) -> LiveRequest | None:
        """Returns the request with this id, running or waiting.

        An aborted one is returned only while its round is in flight and no request with the same
        id waits.
        """
        running = self._running.find(request_id)
        if running is not None and not running.is_aborted:
            return running
        return self._waiting.find(request_id) or running

    def usage(self) -> SchedulerUsage:
        pages = self._running.pages
        return SchedulerUsage(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=pages.num_pages,
            num_free_pages=pages.num_free,
            num_cached_pages=pages.num_cached,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
        )

    def add(self, request: Request) -> None:
        """Puts a request into the queue. Raises RequestError or QueueFull.

        An aborted request's id may be used again. The new request waits until the aborted one's
        round is committed, since results are keyed by id.
        """
        self._admission.check(request)
        live = self.live(request.request_id)
        if live is not None and not live.is_aborted:
            raise RequestError(
                f"request {request.request_id} is being served already: choose another id",
                param="request_id",
            )
        callers = {running.request.caller for running in self._running}
        callers |= {caller for _, caller in self._waiting.classes()}
        # A resumed request was admitted before: the bound is for requests without a token.
        if not request.generated:
            self._admission.check_room(request.caller, self._waiting, callers)
        live = self._admission.admit(request)
        self._fairness.arrived(live, callers)
        self._waiting.add(live)

    def abort(self, request_id: RequestId) -> bool:
        """Drops a request; one in flight keeps its pages until its round is committed.

        Returns False when there is no such request. No emission follows.
        """
        live = self.live(request_id)
        if live is None or live.is_aborted:
            return False
        live.is_aborted = True
        if live not in self._running:
            self._waiting.remove(live)
        elif not live.in_flight:
            self._running.stop(live)
        return True

    def plan(
        self, microbatch: int, *, lacks_mask: Callable[[RequestId], bool] = lambda _: False
    ) -> RoundPlan | None:
        """Returns the next round of a microbatch; None when no request of it can run now.
        `lacks_mask`: says of which requests the next token cannot be chosen yet, so that their last
        known one sits this round out."""
        self._lacks_mask = lacks_mask
        self._microbatches.balance(self._running)
        rows = self._choose_decoding(microbatch)
        self._choose_prefill(microbatch, rows)
        if not rows:
            return None
        return self._depart(microbatch, rows)

    def commit(self, plan: RoundPlan, results: Mapping[RequestId, Committed]) -> list[Emission]:
        """Commits a round and returns its emissions. `results` has an entry for each final item
        that was not aborted."""
        assert plan in self._outstanding, "a plan is committed once, and not after a reset"
        self._outstanding.remove(plan)
        emissions = []
        for item in plan.items:
            live = item.live
            live.in_flight = False
            if live.is_aborted:
                self._running.stop(live)
            elif item.is_final:
                emissions.append(self._commit_final(item, results[live.request_id]))
            else:
                self._running.advance(live, num_computed=item.start + item.num_known)
        return emissions

    def reset_computed(self) -> list[RequestId]:
        """Requeues all running requests for recomputation; call when a stage has lost its store.

        Outstanding plans are void and must not be committed. Returns the ids of these requests.
        """
        victims = [live for live in self._running if not live.is_aborted]
        for live in list(self._running):
            self._running.stop(live)
        self._outstanding.clear()
        self._preempted.clear()
        self.leases.void()
        self._running.pages.forget_cached()
        for live in victims:
            self._waiting.add(live)
        return [live.request_id for live in victims]

    def change_drafter(self) -> None:
        """Switches to the next exit head: requests that draft no longer find pages computed with
        an earlier one. Running requests keep their pages."""
        self._admission.drafter += 1
        for live in self._waiting:
            live.drafter = self._admission.drafter

    def lease(
        self, request_ids: Collection[RequestId] | None, *, untouchable: Set[int]
    ) -> PageLease:
        """Leases the full pages of these running requests (None: of all), up to the first
        untouchable one of each."""
        leased = [
            self._running.full_pages(live, untouchable=untouchable)
            for live in self._running
            if (request_ids is None or live.request_id in request_ids)
            and not live.is_aborted
            and not (live.drafts and live.drafter != self._admission.drafter)
        ]
        return self.leases.lease(leased)

    def reserve(
        self,
        leased: Iterable[LeasedPages],
        *,
        untouchable: Set[int],
        epoch: int = 0,
        limit: int | None = None,
    ) -> PageReservation:
        """Reserves pages for another pipeline's, of those that requests here will hardly need."""
        num_entering = self._config.max_running - len(self._running)
        return self.leases.reserve(
            tuple(leased),
            salt_of=self._admission.salt_of,
            num_reserved=self._running.num_spoken_for(islice(self._waiting, num_entering)),
            untouchable=untouchable,
            epoch=epoch,
            limit=limit,
        )

    def num_missing(self, leased: Sequence[LeasedPages]) -> dict[RequestId, int]:
        """Returns for each request of another pipeline how many of its pages are not cached."""
        return self.leases.num_missing(leased, salt_of=self._admission.salt_of)

    def check(self) -> None:
        """Raises AssertionError when page tables and the allocator disagree."""
        self._running.check(self.leases.owned())
        for live in self._waiting:
            assert not live.pages, f"{live.request_id} waits and holds {len(live.pages)} pages"

    # Choosing. `rows` maps each request to the number of known tokens that the round computes.

    def _choose_decoding(self, microbatch: int) -> dict[LiveRequest, int]:
        """Returns requests that need one row; if not all fit, those that ran least recently."""
        ready = [
            live
            for live in self._at_rest(microbatch)
            if live.is_decoding and not self._lacks_mask(live.request_id)
        ]
        if len(ready) > self._config.token_budget:
            ready.sort(key=lambda live: live.last_turn)
            del ready[self._config.token_budget :]
        short = [live for live in ready if self._running.num_missing(live) > 0]
        stuck = {live for live in short if not self._secure(live)}
        # A request that secured its pages may have lost them to an older one after that.
        return {v: 1 for v in ready if v not in stuck and v in self._running}

    def _choose_prefill(self, microbatch: int, rows: dict[LiveRequest, int]) -> None:
        """Adds chunks of partly computed prompts, and of waiting requests, in the order of
        fairness. Waiting ones start while there are pages and room in the batch, or others have to
        make room."""
        partly = [live for live in self._at_rest(microbatch) if not live.is_decoding]
        evicted: set[LiveRequest] = set()
        """They do not come back in this round, so that it ends whatever their callers' weights."""
        newcomer = self._newcomer(evicted)
        while partly or newcomer is not None:
            budget = self._config.token_budget - sum(rows.values())
            if budget <= 0:
                partly = []
            live = self._fairness.next_prompt(partly, newcomer)
            if live is not None and live is not newcomer:
                partly.remove(live)
                self._take_chunk(live, rows, budget=budget)
                continue
            target = self._microbatches.smaller(self._running, prefer=microbatch)
            has_room = target != microbatch or budget > 0
            if live is None or not has_room or not self._admit(live, target, rows, evicted):
                newcomer = None
                continue
            partly = [other for other in partly if other not in evicted]
            if target == microbatch:
                budget = self._config.token_budget - sum(rows.values())
                self._take_chunk(live, rows, budget=budget)
            newcomer = self._newcomer(evicted)

    def _newcomer(self, evicted: Set[LiveRequest]) -> LiveRequest | None:
        """Returns the waiting request that starts next. Skips those that wait for an aborted one
        with the same id to leave, and those that would sit the round out."""
        heads = self._waiting.heads(
            lambda live: (
                self._running.find(live.request_id) is None
                and live not in evicted
                and not self._lacks_mask(live.request_id)
            )
        )
        return self._fairness.newcomer(heads, running=self._running)

    def _admit(
        self,
        live: LiveRequest,
        microbatch: int,
        rows: dict[LiveRequest, int],
        evicted: set[LiveRequest],
    ) -> bool:
        """Starts a waiting request, in the place of others if it may; returns whether it did. The
        others lose their part in this round; none is preempted unless it starts."""
        victims = self._victims(live)
        if victims is None:
            return False
        for victim in victims:
            rows.pop(victim, None)
            evicted.add(victim)
            self._preempt(victim)
        if not self._start(live, microbatch=microbatch):
            return False
        self._waiting.remove(live)
        return True

    def _victims(self, live: LiveRequest) -> Sequence[LiveRequest] | None:
        """Returns the requests that have to make room for one to start, none as a rule; None if
        there would not be enough of it."""
        cached, num_lacking = self._running.lacking(live)
        running = {live.request_id: live for live in self._running}
        victims: list[LiveRequest] = []
        while len(running) >= self._config.max_running or num_lacking > 0:
            victim = self._sitting_out(running.values()) or self._fairness.victim(
                live,
                running=running.values(),
                waiting=(*self._waiting.heads(lambda _: True), *victims),
            )
            if victim is None:
                return None
            victims.append(victim)
            del running[victim.request_id]
            num_lacking -= sum(
                self._running.pages.num_owners(page) == 1 and page not in cached
                for page in victim.pages
            )
        return victims

    def _sitting_out(self, running: Collection[LiveRequest]) -> LiveRequest | None:
        """Returns the request that makes room first of those that cannot run in this round: it
        starts again when it can."""
        lives = [v for v in running if not v.in_flight and self._lacks_mask(v.request_id)]
        return last_to_stay(lives, running=running) if lives else None

    def _at_rest(self, microbatch: int) -> list[LiveRequest]:
        return [v for v in self._running if v.microbatch == microbatch and not v.in_flight]

    def _take_chunk(self, live: LiveRequest, rows: dict[LiveRequest, int], *, budget: int) -> None:
        """Adds the next rows of a prompt; without a mask for its last one all but that one."""
        num_left = live.num_tokens - live.num_computed - self._lacks_mask(live.request_id)
        if num_left > 0:
            rows[live] = min(num_left, self._config.prefill_chunk, budget)

    def _start(self, live: LiveRequest, *, microbatch: int) -> bool:
        """Starts a request if its known tokens fit; returns whether it did."""
        if not self._running.start(live):
            return False
        live.microbatch = microbatch
        if live.first_scheduled_s is None:
            live.first_scheduled_s = self._clock()
            live.num_cached_prompt_tokens = min(live.num_computed, live.num_prompt)
            self._num_prompt_tokens += live.num_prompt
            self._num_cached_prompt_tokens += live.num_cached_prompt_tokens
        return True

    # Preemption.

    def _secure(self, live: LiveRequest) -> bool:
        """Gets pages for all known tokens of a running request, preempting others if needed.

        Returns False when the request was preempted itself or has to wait for a round in flight.
        """
        if live not in self._running:
            return False
        if self._running.grow(live, self._running.num_missing(live)):
            return True
        self._running.trim(self._running)
        while not self._running.grow(live, self._running.num_missing(live)):
            idle = [v for v in self._running if not v.in_flight]
            if len(idle) == 1:
                return False
            victim = last_to_stay(idle, running=self._running)
            self._preempt(victim)
            if victim is live:
                return False
        return True

    def _preempt(self, live: LiveRequest) -> None:
        self._running.stop(live)
        self._waiting.add(live)
        self._preempted.append(live.request_id)
        self._num_preemptions += 1

    # Departure and arrival of a round.

    def _depart(self, microbatch: int, rows: Mapping[LiveRequest, int]) -> RoundPlan:
        plan = RoundPlan(
            microbatch=microbatch,
            items=tuple(self._item(live, num_rows) for live, num_rows in rows.items()),
            preempted=tuple(self._preempted),
        )
        self._preempted.clear()
        self._outstanding.append(plan)
        return plan

    def _item(self, live: LiveRequest, num_rows: int) -> PlanItem:
        start = live.num_computed
        end = start + num_rows
        is_final = end == live.num_tokens
        max_draft, max_nodes = self._running.draft_room(live) if is_final else (0, 0)
        live.in_flight = True
        self._fairness.charge(live, num_rows)
        self._num_turns += 1
        live.last_turn = self._num_turns
        return PlanItem(
            live=live,
            start=start,
            num_known=num_rows,
            is_final=is_final,
            max_draft=max_draft,
            pages=live.table[: self._running.pages.pages_for(end + max_nodes)],
            max_nodes=0 if live.tree == "none" else max_nodes,
        )

    def _commit_final(self, item: PlanItem, result: Committed) -> Emission:
        live = item.live
        assert result.num_drafted <= max(item.max_draft, item.max_nodes), live.request_id
        assert result.num_accepted <= min(result.num_drafted, item.max_draft), live.request_id
        assert len(result.tokens) == result.num_accepted + 1, live.request_id
        if result.failure is not None:
            self._running.stop(live)
            return Emission(
                request_id=live.request_id,
                tokens=(),
                num_accepted=0,
                finish_reason=FinishReason.ABORT,
                queue_s=_queue_s(live),
                error=result.failure,
                submission=live.request.submission,
            )
        before = live.num_tokens
        finish_reason = live.extend(result.tokens)
        num_emitted = live.num_tokens - before
        self._fairness.charge(live, num_emitted - 1)
        # The verifier's own token has no key and value yet: it is the next round's known token.
        self._running.advance(live, num_computed=live.num_tokens - 1)
        if finish_reason is not None:
            self._running.stop(live)
        elif self._running.pages.num_free < len(self._running):
            self._running.trim([live])
        return Emission(
            request_id=live.request_id,
            tokens=result.tokens[:num_emitted],
            num_accepted=min(result.num_accepted, num_emitted),
            logprobs=result.logprobs[:num_emitted],
            finish_reason=finish_reason,
            num_drafted=result.num_drafted,
            num_cached_prompt_tokens=live.num_cached_prompt_tokens,
            queue_s=_queue_s(live),
            submission=live.request.submission,
        )


def _queue_s(live: LiveRequest) -> float:
    scheduled_s = live.first_scheduled_s
    assert scheduled_s is not None, f"{live.request_id} left without having been scheduled"
    return scheduled_s - live.arrival_s
