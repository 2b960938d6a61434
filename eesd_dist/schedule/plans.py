"""Values that a scheduler returns and takes: plans of rounds, their results, its occupancy."""

from dataclasses import dataclass

from eesd_dist.page_table import PageTable
from eesd_dist.schedule.live import LiveRequest
from eesd_dist.types import RequestId, TokenId, TokenLogprobs, Value


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

    @property
    def context(self) -> int | None:
        """Mean number of stored positions of the requests that decode; None: none of them does."""
        starts = [item.start for item in self.items if item.num_known == 1]
        return sum(starts) // len(starts) if starts else None


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
