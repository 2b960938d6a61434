"""A request that is being served: its tokens so far, and how much of them is in the KV pages.

Knows when its own text ends. Refuses to know who else is running and where pages come from.
"""

from collections.abc import Sequence

from eesd_dist.types import FinishReason, PageId, Request, RequestId, TokenId, TreeShape


class LiveRequest:
    """One request between its arrival and its last token.

    `tokens` is all that may not be lost; pages, microbatch and `num_computed` are cache.
    """

    __slots__ = (
        "arrival_s",
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
        "num_prompt",
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
        self.ticket = ticket
        """Order of arrival; a preempted request keeps it."""
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.num_prompt = len(request.prompt)
        self.tokens: list[TokenId] = [*request.prompt, *request.generated]
        self.max_len = min(self.num_prompt + request.sampling.max_tokens, max_model_len)
        """Prompt and answer together never grow longer than this."""
        self.max_draft_tokens = _draft_ceiling(request, service=max_draft_tokens)
        self.tree: TreeShape = tree if self.max_draft_tokens > 0 else "none"
        """What its drafts look like."""
        self.max_tree_nodes = max_tree_nodes
        self.drafter = drafter
        """Which of the exit heads that have served computed its pages."""
        self.num_computed = 0
        """Positions whose keys and values are valid in every stage."""
        self.pages: list[PageId] = []
        self.microbatch = 0
        self.num_cached_prompt_tokens = 0
        self.last_turn = 0
        """Which turn of all turns was its last; who waited longest goes first if not all fit."""
        self.in_flight = False
        self.is_aborted = False

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def salt(self) -> str:
        """Whose pages it can share: only a request that drafts fills the exit head's own KV."""
        return salt_of(drafts=self.drafts, drafter=self.drafter)

    @property
    def drafts(self) -> bool:
        return self.max_draft_tokens > 0

    @property
    def is_decoding(self) -> bool:
        """Only its last token has not been computed."""
        return len(self.tokens) - self.num_computed == 1

    @property
    def max_draft(self) -> int:
        """Draft tokens of which each could still be wanted; the verifier's own token is extra."""
        return max(0, min(self.max_draft_tokens, self.max_len - len(self.tokens) - 1))

    @property
    def max_nodes(self) -> int:
        """Tokens of a drafted tree, `max_draft` levels deep at most; of a chain `max_draft`."""
        if self.tree == "none":
            return self.max_draft
        return self.max_tree_nodes if self.max_draft > 0 else 0

    def extend(self, tokens: Sequence[TokenId]) -> FinishReason | None:
        """Appends tokens up to the one that ends the text, and says why it ended if it did."""
        sampling = self.request.sampling
        for token in tokens:
            may_stop = self.num_generated >= sampling.min_tokens
            self.tokens.append(token)
            if may_stop and token in sampling.stop_token_ids:
                return FinishReason.STOP
            if len(self.tokens) >= self.max_len:
                return FinishReason.LENGTH
        return None


def salt_of(*, drafts: bool, drafter: int) -> str:
    """Which pages requests can share, by whether they draft and with which exit head."""
    return f"exit {drafter}" if drafts else "plain"


def _draft_ceiling(request: Request, *, service: int) -> int:
    speculation = request.speculation
    if speculation.mode == "off":
        return 0
    if speculation.max_draft_tokens is None:
        return service
    return min(service, speculation.max_draft_tokens)
