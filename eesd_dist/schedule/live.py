"""A live request: its tokens so far, and how many of them are in the KV pages.

Decides when the text ends. Independent of other requests and of page allocation.
"""

from collections.abc import Sequence

from eesd_dist.page_table import PageTable
from eesd_dist.types import FinishReason, PageId, Request, RequestId, TokenId, TreeShape


class LiveRequest:
    """A request between its arrival and its last token.

    `tokens` must not be lost; pages, microbatch and `num_computed` can be recomputed.
    """

    __slots__ = (
        "_table",
        "arrival_s",
        "choice_params",
        "drafter",
        "first_scheduled_s",
        "in_flight",
        "is_aborted",
        "last_turn",
        "max_draft_tokens",
        "max_len",
        "max_tree_nodes",
        "microbatch",
        "num_cached_prompt_tokens",
        "num_computed",
        "pages",
        "request",
        "ticket",
        "tokens",
        "tree",
    )

    def __init__(
        self,
        request: Request,
        *,
        ticket: int,
        arrival_s: float,
        max_model_len: int,
        max_draft_tokens: int,
        tree: TreeShape = "none",
        max_tree_nodes: int = 0,
        drafter: int = 0,
    ) -> None:
        self.request = request
        self.choice_params = request.sampling.choice_params
        self.ticket = ticket
        """Order of arrival; a preempted request keeps it."""
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.tokens: list[TokenId] = [*request.prompt, *request.generated]
        self.max_len = min(len(request.prompt) + request.sampling.max_tokens, max_model_len)
        """Maximum length of prompt and answer together."""
        self.max_draft_tokens = _draft_ceiling(request, service=max_draft_tokens)
        self.tree: TreeShape = tree if self.max_draft_tokens > 0 else "none"
        """The shape of its drafts."""
        self.max_tree_nodes = max_tree_nodes
        self.drafter = drafter
        """Number of the exit head that computed its pages."""
        self.num_computed = 0
        """Number of positions with valid keys and values in every stage."""
        self.pages: list[PageId] = []
        """Changed by `add_pages` and `drop_pages`."""
        self._table: PageTable | None = None
        self.microbatch = 0
        self.num_cached_prompt_tokens = 0
        self.last_turn = 0
        """Turn in which it last ran, counted over all requests; if not all fit, the lowest goes
        first."""
        self.in_flight = False
        self.is_aborted = False

    def add_pages(self, pages: Sequence[PageId]) -> None:
        self.pages += pages
        self._table = None

    def drop_pages(self, count: int) -> list[PageId]:
        """Removes and returns the last `count` pages."""
        first = len(self.pages) - count
        dropped = self.pages[first:]
        del self.pages[first:]
        self._table = None
        return dropped

    @property
    def table(self) -> PageTable:
        """The pages as an array, which does not change with them."""
        if self._table is None:
            self._table = PageTable(self.pages)
        return self._table

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while it has still to report the log-probabilities of its prompt."""
        return self.request.wants_prompt_logprobs and self.num_generated == 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def salt(self) -> str:
        """Salt of its page digests: only requests that draft fill the exit head's own pages."""
        return salt_of(drafts=self.drafts, drafter=self.drafter, cache_salt=self.request.cache_salt)

    @property
    def drafts(self) -> bool:
        return self.max_draft_tokens > 0

    @property
    def is_decoding(self) -> bool:
        """True if only its last token has not been computed."""
        return len(self.tokens) - self.num_computed == 1

    @property
    def max_draft(self) -> int:
        """Maximum useful draft length; the verifier's own token is not counted."""
        return max(0, min(self.max_draft_tokens, self.max_len - len(self.tokens) - 1))

    @property
    def max_nodes(self) -> int:
        """Maximum tokens of a draft: a tree with at most `max_draft` levels, or a chain."""
        if self.tree == "none":
            return self.max_draft
        return self.max_tree_nodes if self.max_draft > 0 else 0

    def extend(self, tokens: Sequence[TokenId]) -> FinishReason | None:
        """Appends tokens up to the one that ends the text; returns why it ended, or None."""
        sampling, own_tokens = self.request.sampling, self.tokens
        first_stop = self.num_prompt + sampling.min_tokens
        for token in tokens:
            own_tokens.append(token)
            if token in sampling.stop_token_ids and len(own_tokens) > first_stop:
                return FinishReason.STOP
            if len(own_tokens) >= self.max_len:
                return FinishReason.LENGTH
        return None


def salt_of(*, drafts: bool, drafter: int, cache_salt: str) -> str:
    """Returns the salt of page digests: requests share pages when it is equal."""
    stage = f"exit {drafter}" if drafts else "plain"
    return f"{stage}\n{cache_salt}"  # the first part has no line break: two salts are never equal


def _draft_ceiling(request: Request, *, service: int) -> int:
    speculation = request.speculation
    if speculation.mode == "off":
        return 0
    if speculation.max_draft_tokens is None:
        return service
    return min(service, speculation.max_draft_tokens)


def ticket_of(live: LiveRequest) -> int:
    """Returns what requests are ordered by: their arrival."""
    return live.ticket
