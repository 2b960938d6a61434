"""The scheduler: which requests run in a round, with how many rows and in which pages.

Prefill chunks, decoding and drafting are the same: a request has known tokens that are not computed
yet, and room for a draft after the last of them. When pages run short, drafts shrink first; then
the youngest request is preempted. Tokens are never lost.

Independent of tensors, stages, controllers and text. Not thread-safe: one thread owns a scheduler.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice, takewhile

from eesd_dist.config import SchedulerConfig, TreeConfig
from eesd_dist.errors import QueueFull, RequestError
from eesd_dist.page_table import PageTable
from eesd_dist.schedule.fairness import Fairness, WaitingRequests, last_to_stay
from eesd_dist.schedule.gate import Gate
from eesd_dist.schedule.live import LiveRequest, salt_of, ticket_of
from eesd_dist.schedule.page_leases import LeasedPages, PageLease, PageLeases, PageReservation
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.types import (
    Emission,
    FinishReason,
    PageId,
    Request,
    RequestId,
    TokenId,
    TokenLogprobs,
    Value,
)


class PlanItem(Value, frozen=True, kw_only=True, eq=False):
    """A request's rows in a round: `num_known` known tokens from `start`, then its draft."""

    live: LiveRequest
    start: int
    num_known: int
    is_final: bool
    """The last known token is the request's last token: its row gets a verdict and may draft."""
    max_draft: int
    """Maximum length of a chain of drafted tokens."""
    pages: PageTable
    """Page table covering KV slots [0, start + num_known + max_draft), or max_nodes for a tree."""
    max_nodes: int = 0
    """Maximum tokens of the draft when it is a tree; 0 for a chain."""


class RoundPlan(Value, frozen=True, kw_only=True, eq=False):
    """A round's requests. Their microbatch joins no other round until this one is committed."""

    microbatch: int
    items: tuple[PlanItem, ...]
    preempted: tuple[RequestId, ...]
    """Requests that lost their pages since the last plan and will be recomputed."""


class Committed(Value, frozen=True, kw_only=True):
    """A round's result for one final item."""

    tokens: tuple[TokenId, ...]
    """The accepted draft tokens, then the verifier's own."""
    num_drafted: int
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    failure: str | None = None
    """Reason why the text cannot go on: then it ends without these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerUsage:
    """Current occupancy of the scheduler, and its counts so far."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    """Free pages and cached ones that would be evicted."""
    num_cached_pages: int
    num_preemptions: int
    num_prompt_tokens: int
    """Prompt tokens of admitted requests, including `num_cached_prompt_tokens`."""
    num_cached_prompt_tokens: int


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
        self._tree = tree or TreeConfig()
        self._pages = pages
        self.leases = PageLeases(pages)
        """Pages that another pipeline reads or writes."""
        self._max_model_len = max_model_len
        self._max_draft_tokens = max_draft_tokens
        self._clock = clock
        self._gate = Gate(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            num_pages=pages.num_pages,
            page_size=pages.page_size,
        )
        self._num_microbatches = 2 if config.overlap else 1
        self._overlaps = self._num_microbatches == 2
        # A page table's fair share: the room reserved for a new run to grow.
        self._fair_share = pages.num_pages // config.max_running
        self._fairness = Fairness()
        self._waiting = WaitingRequests()
        self._running: dict[RequestId, LiveRequest] = {}
        self._outstanding: list[RoundPlan] = []
        self._preempted: list[RequestId] = []
        self._lacks_mask: Callable[[RequestId], bool] = lambda _: False
        self._drafter = 0
        self._num_tickets = 0
        self._num_turns = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0

    @property
    def num_microbatches(self) -> int:
        return self._num_microbatches

    def set_overlap(self, overlap: bool) -> None:
        """Sets whether requests go into both microbatches, or all into the first as soon as they
        are not in flight. Does nothing where there is only one."""
        self._overlaps = overlap and self._num_microbatches == 2

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> Iterable[LiveRequest]:
        """Returns the requests that hold pages."""
        return self._running.values()

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def live(self, request_id: RequestId) -> LiveRequest | None:
        """Returns the request with this id, running or waiting.

        An aborted one is returned only while its round is in flight and no request with the same
        id waits.
        """
        running = self._running.get(request_id)
        if running is not None and not running.is_aborted:
            return running
        return self._waiting.find(request_id) or running

    def usage(self) -> SchedulerUsage:
        return SchedulerUsage(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self._pages.num_pages,
            num_free_pages=self._pages.num_free,
            num_cached_pages=self._pages.num_cached,
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
        )

    def add(self, request: Request) -> None:
        """Puts a request into the queue. Raises RequestError or QueueFull.

        An aborted request's id may be used again. The new request waits until the aborted one's
        round is committed, since results are keyed by id.
        """
        self._gate.check(request)
        live = self.live(request.request_id)
        if live is not None and not live.is_aborted:
            raise RequestError(
                f"request {request.request_id} is being served already: choose another id",
                param="request_id",
            )
        callers = {running.request.caller for running in self._running.values()}
        callers |= {caller for _, caller in self._waiting.classes()}
        # A resumed request was admitted before: the bound is for requests without a token.
        if not request.generated:
            self._check_room(request.caller, callers)
        live = LiveRequest(
            request,
            ticket=self._num_tickets,
            arrival_s=self._clock(),
            max_model_len=self._max_model_len,
            max_draft_tokens=self._max_draft_tokens,
            tree=self._tree.shape_of(request.speculation.tree),
            max_tree_nodes=self._tree.max_nodes,
            drafter=self._drafter,
        )
        self._fairness.arrived(live, callers)
        self._waiting.add(live)
        self._num_tickets += 1

    def _check_room(self, caller: str, others: Set[str]) -> None:
        """Raises QueueFull if the queue is full and this caller has its share of it. Since a caller
        gets its share of a full queue too, the queue may reach twice its size, and no more."""
        limit, num_waiting = self._config.max_waiting, len(self._waiting)
        if num_waiting < limit:
            return
        num_callers = len(others | {caller})
        share = 0 if num_callers == 1 else max(1, limit // num_callers)
        if self._waiting.num_of(caller) >= share or num_waiting >= 2 * limit:
            raise QueueFull(num_waiting=num_waiting, limit=limit)

    def abort(self, request_id: RequestId) -> bool:
        """Drops a request; one in flight keeps its pages until its round is committed.

        Returns False when there is no such request. No emission follows.
        """
        live = self.live(request_id)
        if live is None or live.is_aborted:
            return False
        live.is_aborted = True
        if self._running.get(request_id) is not live:
            self._waiting.remove(live)
        elif not live.in_flight:
            self._leave(live)
        return True

    def plan(
        self, microbatch: int, *, lacks_mask: Callable[[RequestId], bool] = lambda _: False
    ) -> RoundPlan | None:
        """Returns the next round of a microbatch; None when no request of it can run now.
        `lacks_mask`: says of which requests the next token cannot be chosen yet, so that their last
        known one sits this round out."""
        self._lacks_mask = lacks_mask
        self._balance()
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
                self._leave(live)
            elif item.is_final:
                emissions.append(self._commit_final(item, results[live.request_id]))
            else:
                self._advance(live, num_computed=item.start + item.num_known)
        return emissions

    def fail_all(self) -> list[RequestId]:
        """Drops all requests, outstanding plans and cached pages; returns the requests' ids."""
        failed = [live for live in self._in_order() if not live.is_aborted]
        self._lose_stores()
        self._waiting.clear()
        return [live.request_id for live in failed]

    def reset_computed(self) -> list[RequestId]:
        """Requeues all running requests for recomputation; call when a stage has lost its store.

        Outstanding plans are void and must not be committed. Returns the ids of these requests.
        """
        victims = [live for live in self._running.values() if not live.is_aborted]
        self._lose_stores()
        for live in victims:
            self._waiting.add(live)
        return [live.request_id for live in victims]

    def change_drafter(self) -> None:
        """Switches to the next exit head: requests that draft no longer find pages computed with
        an earlier one. Running requests keep their pages."""
        self._drafter += 1
        for live in self._waiting:
            live.drafter = self._drafter

    def lease(
        self, request_ids: Collection[RequestId] | None, *, untouchable: Set[int]
    ) -> PageLease:
        """Leases the full pages of these running requests (None: of all), up to the first
        untouchable one of each."""
        leased = []
        for live in self._running.values():
            is_selected = request_ids is None or live.request_id in request_ids
            if (
                not is_selected
                or live.is_aborted
                or (live.drafts and live.drafter != self._drafter)
            ):
                continue
            full = live.pages[: live.num_computed // self._pages.page_size]
            pages = tuple(takewhile(lambda page: page not in untouchable, full))
            leased.append(
                LeasedPages(
                    request_id=live.request_id,
                    tokens=tuple(live.tokens[: len(pages) * self._pages.page_size]),
                    pages=pages,
                    drafts=live.drafts,
                    cache_salt=live.request.cache_salt,
                )
            )
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
        return self.leases.reserve(
            tuple(leased),
            salt_of=self._salt_of,
            num_reserved=self._num_spoken_for(),
            untouchable=untouchable,
            epoch=epoch,
            limit=limit,
        )

    def num_missing(self, leased: Sequence[LeasedPages]) -> dict[RequestId, int]:
        """Returns for each request of another pipeline how many of its pages are not cached."""
        return self.leases.num_missing(leased, salt_of=self._salt_of)

    def _salt_of(self, leased: LeasedPages) -> str:
        return salt_of(
            drafts=leased.drafts and self._max_draft_tokens > 0,
            drafter=self._drafter,
            cache_salt=leased.cache_salt,
        )

    def _num_spoken_for(self) -> int:
        """Returns how many free pages to keep for requests of this pipeline, each up to its fair
        share. They may need more, but few answers reach their maximum length."""
        num_entering = self._config.max_running - len(self._running)
        return sum(
            max(1, self._fair_need(live) - len(live.pages)) for live in self._running.values()
        ) + sum(
            max(self._num_missing(live, extra=0), self._fair_need(live))
            for live in islice(self._waiting, num_entering)
        )

    def _fair_need(self, live: LiveRequest) -> int:
        """Returns the pages that a request may grow to, at most its fair share."""
        return min(self._pages.pages_for(live.max_len - 1), self._fair_share)

    def check(self) -> None:
        """Raises AssertionError when page tables and the allocator disagree."""
        self._pages.check()
        num_owners = [0] * self._pages.num_pages
        for live in self._running.values():
            for page in live.pages:
                num_owners[page] += 1
        for page in self.leases.owned():
            num_owners[page] += 1
        for page, count in zip(map(PageId, range(len(num_owners))), num_owners, strict=True):
            actual = self._pages.num_owners(page)
            assert count == actual, f"page {page} is in {count} tables and has {actual} owners"
        for live in self._waiting:
            assert not live.pages, f"{live.request_id} waits and holds {len(live.pages)} pages"

    # Microbatches.

    def _smaller_microbatch(self, *, prefer: int) -> int:
        if not self._overlaps:
            return 0
        sizes = self._sizes()
        return min(
            range(self._num_microbatches),
            key=lambda microbatch: (sizes[microbatch], microbatch != prefer),
        )

    def _balance(self) -> None:
        """Evens out the microbatches by moving requests that are not in flight."""
        if not self._overlaps:
            for live in self._running.values():
                if live.microbatch and not live.in_flight:
                    live.microbatch = 0
            return
        sizes = self._sizes()
        larger = 0 if sizes[0] > sizes[1] else 1
        num_moves = abs(sizes[0] - sizes[1]) // 2
        if num_moves == 0:
            return
        idle = [v for v in self._running.values() if v.microbatch == larger and not v.in_flight]
        for live in idle[len(idle) - min(num_moves, len(idle)) :]:
            live.microbatch = 1 - larger

    def _sizes(self) -> list[int]:
        in_second = sum(live.microbatch for live in self._running.values())
        return [len(self._running) - in_second, in_second]

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
        short = [live for live in ready if self._num_missing(live, extra=0) > 0]
        stuck = {live for live in short if not self._secure(live)}
        # A request that secured its pages may have lost them to an older one after that.
        return {v: 1 for v in ready if v not in stuck and v.request_id in self._running}

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
            target = self._smaller_microbatch(prefer=microbatch)
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
                live.request_id not in self._running
                and live not in evicted
                and not self._lacks_mask(live.request_id)
            )
        )
        return self._fairness.newcomer(heads, running=self._running.values())

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
        cached, num_lacking = self._lacking(live)
        running = dict(self._running)
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
                self._pages.num_owners(page) == 1 and page not in cached for page in victim.pages
            )
        return victims

    def _sitting_out(self, running: Collection[LiveRequest]) -> LiveRequest | None:
        """Returns the request that makes room first of those that cannot run in this round: it
        starts again when it can."""
        lives = [v for v in running if not v.in_flight and self._lacks_mask(v.request_id)]
        return last_to_stay(lives, running=running) if lives else None

    def _at_rest(self, microbatch: int) -> list[LiveRequest]:
        return [v for v in self._running.values() if v.microbatch == microbatch and not v.in_flight]

    def _take_chunk(self, live: LiveRequest, rows: dict[LiveRequest, int], *, budget: int) -> None:
        """Adds the next rows of a prompt; without a mask for its last one all but that one."""
        num_left = live.num_tokens - live.num_computed - self._lacks_mask(live.request_id)
        if num_left > 0:
            rows[live] = min(num_left, self._config.prefill_chunk, budget)

    # Pages.

    def _start(self, live: LiveRequest, *, microbatch: int) -> bool:
        """Starts a request if its known tokens fit; returns whether it did."""
        live.add_pages(self._cached(live))
        num_cached = len(live.pages) * self._pages.page_size
        if not self._grow(live, self._num_missing(live, extra=0)):
            self._pages.release(live.drop_pages(len(live.pages)))
            return False
        live.num_computed = num_cached
        live.microbatch = microbatch
        self._running[live.request_id] = live
        if live.first_scheduled_s is None:
            self._count_arrival(live)
        return True

    def _cached(self, live: LiveRequest) -> Sequence[PageId]:
        """Returns cached pages of its known tokens, which it owns from now on."""
        # Every row is computed where features or log-probabilities of all are returned.
        if live.request.features is not None or live.wants_prompt_logprobs:
            return ()
        return self._pages.match_prefix(live.tokens, salt=live.salt)

    def _lacking(self, live: LiveRequest) -> tuple[Set[PageId], int]:
        """Returns cached pages of its known tokens, and how many are too few for the others and one
        more; at most 0 if there are enough. With no other running request it may take the last."""
        cached = self._cached(live)
        num_reserved = 1 if self._running else 0
        missing = self._pages.pages_for(live.num_tokens) - len(cached)
        num_lacking = missing + num_reserved - self._pages.num_free
        self._pages.release(cached)
        return frozenset(cached), num_lacking

    def _count_arrival(self, live: LiveRequest) -> None:
        live.first_scheduled_s = self._clock()
        live.num_cached_prompt_tokens = min(live.num_computed, live.num_prompt)
        self._num_prompt_tokens += live.num_prompt
        self._num_cached_prompt_tokens += live.num_cached_prompt_tokens

    def _num_missing(self, live: LiveRequest, *, extra: int) -> int:
        """Returns how many pages it lacks for its known tokens and `extra` more."""
        return self._pages.pages_for(live.num_tokens + extra) - len(live.pages)

    def _grow(self, live: LiveRequest, count: int) -> bool:
        """Appends `count` pages to its table if there are so many; returns whether it did."""
        pages = self._pages.allocate(
            count,
            after=live.pages[-1] if live.pages else None,
            expected=self._fair_need(live) - len(live.pages),
        )
        live.add_pages(pages or ())
        return pages is not None

    def _secure(self, live: LiveRequest) -> bool:
        """Gets pages for all known tokens of a running request, preempting others if needed.

        Returns False when the request was preempted itself or has to wait for a round in flight.
        """
        if live.request_id not in self._running:
            return False
        if self._grow(live, self._num_missing(live, extra=0)):
            return True
        self._trim(self._running.values())
        while not self._grow(live, self._num_missing(live, extra=0)):
            idle = [v for v in self._running.values() if not v.in_flight]
            if len(idle) == 1:
                return False
            victim = last_to_stay(idle, running=self._running.values())
            self._preempt(victim)
            if victim is live:
                return False
        return True

    def _trim(self, lives: Iterable[LiveRequest]) -> None:
        """Releases pages that were allocated for drafts."""
        for live in lives:
            surplus = -self._num_missing(live, extra=0)
            if surplus > 0 and not live.in_flight:
                self._pages.release(live.drop_pages(surplus))

    def _preempt(self, live: LiveRequest) -> None:
        self._leave(live)
        self._waiting.add(live)
        self._preempted.append(live.request_id)
        self._num_preemptions += 1

    def _leave(self, live: LiveRequest) -> None:
        """Removes a request from the running ones and releases its pages; its tokens stay."""
        del self._running[live.request_id]
        self._pages.release(live.drop_pages(len(live.pages)))
        live.num_computed = 0
        live.in_flight = False

    def _lose_stores(self) -> None:
        for live in list(self._running.values()):
            self._leave(live)
        self._outstanding.clear()
        self._preempted.clear()
        self.leases.void()
        self._pages.forget_cached()

    def _in_order(self) -> list[LiveRequest]:
        return sorted([*self._running.values(), *self._waiting], key=ticket_of)

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
        max_draft, max_nodes = self._draft_room(live) if is_final else (0, 0)
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
            pages=live.table[: self._pages.pages_for(end + max_nodes)],
            max_nodes=0 if live.tree == "none" else max_nodes,
        )

    def _draft_room(self, live: LiveRequest) -> tuple[int, int]:
        """Allocates spare pages for a draft; returns its maximum depth and number of tokens."""
        max_nodes = live.max_nodes
        missing = self._num_missing(live, extra=max_nodes)
        if missing > 0:
            # A draft never takes a page that another request's known tokens may need next.
            num_spare = self._pages.num_free - (len(self._running) - 1)
            self._grow(live, max(0, min(missing, num_spare)))
            room = len(live.pages) * self._pages.page_size - live.num_tokens
            max_nodes = min(max_nodes, room)
        return min(live.max_draft, max_nodes), max_nodes

    def _commit_final(self, item: PlanItem, result: Committed) -> Emission:
        live = item.live
        assert result.num_drafted <= max(item.max_draft, item.max_nodes), live.request_id
        assert result.num_accepted <= min(result.num_drafted, item.max_draft), live.request_id
        assert len(result.tokens) == result.num_accepted + 1, live.request_id
        if result.failure is not None:
            self._leave(live)
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
        self._advance(live, num_computed=live.num_tokens - 1)
        if finish_reason is not None:
            self._leave(live)
        elif self._pages.num_free < len(self._running):
            self._trim([live])
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

    def _advance(self, live: LiveRequest, *, num_computed: int) -> None:
        size = self._pages.page_size
        if num_computed // size > live.num_computed // size:
            self._pages.register(live.tokens, live.pages, num_computed=num_computed, salt=live.salt)
        live.num_computed = num_computed


def _queue_s(live: LiveRequest) -> float:
    scheduled_s = live.first_scheduled_s
    assert scheduled_s is not None, f"{live.request_id} left without having been scheduled"
    return scheduled_s - live.arrival_s
