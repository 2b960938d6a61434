"""The requests of an engine, from `add` to their end.

Scheduler, controllers, draft stage, recorder and beliefs each have state of a request; this is the
only place that admits a request to them and ends it in all of them.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eesd_dist.config import SpeculationConfig
from eesd_dist.control.belief import Belief
from eesd_dist.control.policy import DraftPolicy
from eesd_dist.engine.acceptance import PromptLogprobs
from eesd_dist.engine.drafting.stage import DraftStage
from eesd_dist.engine.masks import ConstrainedText, Masks
from eesd_dist.engine.recording.recorder import RecorderTap
from eesd_dist.engine.recording.text_features import FeatureTap
from eesd_dist.errors import RequestError
from eesd_dist.routing.beliefs import BeliefBook, DraftPlan
from eesd_dist.schedule.plans import PlanItem
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.types import Emission, Outcome, Request, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    num_running: int
    num_waiting: int
    free_pages: int
    num_pages: int
    num_preemptions: int = 0
    """Preemptions since the engine was built, as the two below."""
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that have begun."""
    num_cached_prompt_tokens: int = 0
    """Number of those tokens that were found in the prefix cache."""


class _Arrival(NamedTuple):
    request: Request
    plan: DraftPlan | None
    constraint: ConstrainedText | None


class EngineRequests:
    """Admits and ends requests. `add`, `abort` and `advise` may be called from any thread, the rest
    from the round loop's.

    `lock` guards the scheduler and all state per request.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        policy: DraftPolicy,
        draft: DraftStage,
        recorder: RecorderTap | None,
        features: FeatureTap,
        prompts: PromptLogprobs,
        book: BeliefBook | None,
        speculation: SpeculationConfig,
        masks: Masks,
    ) -> None:
        self.lock = threading.Lock()
        self._arrived = threading.Event()
        self._scheduler = scheduler
        self._policy = policy
        self._draft = draft
        self._recorder = recorder
        self._features = features
        self._prompts = prompts
        self._book = book
        self._speculation = speculation
        self._masks = masks
        self._returning: dict[RequestId, _Arrival] = {}
        """Waiting requests with the id of an aborted one in flight; admitted when that one ends."""

    def add(self, request: Request, plan: DraftPlan | None) -> None:
        """Queues a request.

        Raises RequestError if it can never be served and CapacityError if the queue is full.
        """
        self._refuse_odd_tree(request)
        self._refuse_odd_prompt(request)
        arrival = _Arrival(request, plan, self._masks.text_of(request))
        with self.lock:
            self._policy.check(request.speculation.controller)
            self._features.check(request)
            before = self._scheduler.live(request.request_id)
            self._scheduler.add(request)
            if before is None:
                self._admit(arrival)
            else:  # aborted, and its round still uses this id
                self._returning[request.request_id] = arrival
        self.wake()

    def abort(self, request_id: RequestId) -> None:
        with self.lock:
            self._scheduler.abort(request_id)
            self._returning.pop(request_id, None)
            if self._scheduler.live(request_id) is None:
                self._end(request_id)
        self.wake()

    def advise(self, plans: Mapping[RequestId, DraftPlan]) -> None:
        with self.lock:
            self._policy.advise({request_id: plan.belief for request_id, plan in plans.items()})

    def wait(self, timeout_s: float) -> None:
        """Returns when the round loop has new work, or after `timeout_s`."""
        self._arrived.wait(timeout_s)
        self._arrived.clear()

    def wake(self) -> None:
        """Ends `wait`; from any thread."""
        self._arrived.set()

    def load(self) -> EngineLoad:
        with self.lock:
            usage = self._scheduler.usage()
        return EngineLoad(
            num_running=usage.num_running,
            num_waiting=usage.num_waiting,
            free_pages=usage.num_free_pages,
            num_pages=usage.num_pages,
            num_preemptions=usage.num_preemptions,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_prompt_tokens=usage.num_cached_prompt_tokens,
        )

    def committed(
        self,
        items: Sequence[PlanItem],
        emissions: Sequence[Emission],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Records, learns from and ends requests after a round's commit; under the lock."""
        self._masks.committed(emissions)
        if self._recorder is not None:
            for emission in emissions:
                self._recorder.commit(emission.request_id, len(emission.tokens))
        self._policy.observe(outcomes)
        if self._book is not None and self._speculation.learn:
            self._book.observe(outcomes)
        for item in items:
            self._settle(item.live.request_id)

    def stages_lost(self) -> None:
        """Ends requests aborted in flight, after the scheduler was reset; under the lock."""
        for request_id in self._policy.live():
            self._settle(request_id)

    def _settle(self, request_id: RequestId) -> None:
        """Ends a request that the scheduler has dropped, and admits one waiting for its id."""
        returning = self._returning.pop(request_id, None)
        if returning is not None or self._scheduler.live(request_id) is None:
            self._end(request_id)
        if returning is not None:
            self._admit(returning)

    def _refuse_odd_tree(self, request: Request) -> None:
        shape = self._speculation.tree.shape_of(request.speculation.tree)
        if shape != "none" and self._speculation.acceptance == "rejection":
            raise RequestError(
                f"speculation.tree is {shape} and this service accepts by rejection sampling, "
                "which judges chains: leave it out, or set it to none",
                param="speculation.tree",
            )

    def _refuse_odd_prompt(self, request: Request) -> None:
        if request.wants_prompt_logprobs and self._speculation.acceptance == "rejection":
            raise RequestError(
                "this service accepts by rejection sampling, and reports no log-probabilities of "
                "prompts: leave out echo with logprobs, or prompt_logprobs",
                param="prompt_logprobs",
            )

    def _admit(self, arrival: "_Arrival") -> None:
        request, plan, constraint = arrival
        if constraint is not None:
            self._draft.constraints[request.request_id] = constraint
            self._masks.admit(constraint)
        if plan is None and self._book is not None:
            plan = self._book.admit(request.request_id, request.workload, caller=request.caller)
        self._policy.admit(
            request.request_id,
            request.speculation.controller,
            plan.belief if plan is not None else Belief(),
        )
        if self._recorder is not None:
            self._recorder.admit(request)
        self._features.admit(request)
        self._prompts.admit(request)

    def _end(self, request_id: RequestId) -> None:
        if self._recorder is not None:
            self._recorder.end(request_id)
        self._features.end(request_id)
        self._prompts.end(request_id)
        self._draft.forget(request_id)
        self._draft.constraints.pop(request_id, None)
        self._masks.end(request_id)
        self._policy.end(request_id)
        if self._book is not None:
            self._book.finish(request_id)
