"""The values that cross seams: requests, drafts, verdicts, outcomes, statistics.

Frozen, free of tensors and of text: token ids inside, text at the rim. Nothing here knows Ray,
torch or HTTP.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal, NewType

from msgspec import Meta

TokenId = NewType("TokenId", int)
RequestId = NewType("RequestId", str)
PageId = NewType("PageId", int)

DType = Literal["float32", "bfloat16", "float16"]
DTypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Numerics = Literal["invariant", "fast"]
StopRule = Literal["auto", "bernoulli", "optimal", "steady"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; the same meaning as in the OpenAI API and in vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """Noise is keyed by (seed, position, token): the same seed gives the same text anywhere. All of
    its 64 bits count; -1 and 2**64 - 1 are one seed."""
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, the model's own end tokens included unless `ignore_eos`."""
    top_logprobs: int | None = None
    """How many alternatives to report beside each token's log-probability; None reports nothing."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_full_row(self) -> bool:
        """Whether a vocabulary shard's local maximum is not enough to choose."""
        return (
            self.needs_history
            or bool(self.logit_bias)
            or self.min_tokens > 0
            or (not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0))
        )


TreeShape = Literal["none", "static", "dynamic"]
"""A draft is a chain, a tree of fixed widths, or one that grows where it is likely to survive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """What one request says about speculation: it changes how long a text takes, never the text."""

    mode: Literal["off", "auto"] = "auto"
    controller: str | None = None
    """Name in `control.registry`; None takes the service's default."""
    max_draft_tokens: int | None = None
    """None takes the service's ceiling."""
    tree: TreeShape | None = None
    """None takes the service's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request is its prompt, parameters, seed and tokens so far; the rest is cache."""

    request_id: RequestId
    prompt: tuple[TokenId, ...]
    sampling: SamplingParams
    speculation: SpeculationParams = SpeculationParams()
    generated: tuple[TokenId, ...] = ()
    """Tokens that have already left, when a request is resumed elsewhere."""
    workload: str = "default"
    """The class whose pooled prior warms this request's belief."""
    traceparent: str | None = None
    """W3C trace context of the HTTP request this belongs to."""
    crashes: int = 0
    """How often an engine broke under it since its last token, wherever that was."""
    attributable_crashes: int = 0
    """Of these, the ones that a request can have brought about."""
    submission: int = 0
    """Which of its stays in an engine this is, later ones being higher. Its emissions say it too:
    tokens of an earlier one may still be on their way."""


PROBE = "probe"
"""The workload class of health checks, which no statistics of requests count."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the exit head says of the token it would draft next.

    Computed before the token is drafted: a controller may look at all of it and cannot bias the
    text, since every token is verified by the rule of coupled sampling.
    """

    depth: int
    """How many tokens this draft already has."""
    top1_prob: float
    top2_margin: float
    """Probability of the best minus that of the second best."""
    entropy: float
    """In nats."""
    gap: float = 0.0
    """How far the drafted token's score lies above the runner-up's, noise included: the larger, the
    more the target's logits must differ before it chooses otherwise. In units of the Gumbel noise
    (logits over temperature); at temperature 0 plain logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the verifier said of one draft."""

    num_drafted: int
    num_accepted: int
    next_token: TokenId
    """The verifier's own token: recovered after a rejection, bonus when none was."""

    @property
    def rejected(self) -> bool:
        return self.num_accepted < self.num_drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A point of a drafted tree that its verdict came to: what stood there, and what was chosen."""

    depth: int
    """How many drafted tokens lie before it."""
    num_offered: int
    """How many tokens were drafted to follow it: the exit head's first choice, then its next."""
    chosen_rank: int
    """Which of them was the verifier's own; -1: none."""
    evidence: Evidence
    """What the exit head said there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request's round as a controller may learn from it: counts and evidence, no text."""

    request_id: RequestId
    num_drafted: int
    num_accepted: int
    evidence: tuple[Evidence, ...] = ()
    """One per drafted token of a chain, in order; empty for a tree, whose branches have it."""
    branches: tuple[Branch, ...] = ()
    """Of a tree: where its verdict passed and tokens had been drafted, from the root on."""

    @property
    def num_first_accepted(self) -> int:
        """How often the exit head's first choice was judged right."""
        if self.branches:
            return sum(branch.chosen_rank == 0 for branch in self.branches)
        return self.num_accepted

    @property
    def num_first_rejected(self) -> int:
        """How often it was judged wrong; what follows a rejected token was never judged."""
        if self.branches:
            return sum(branch.chosen_rank != 0 for branch in self.branches)
        return int(self.num_accepted < self.num_drafted)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities under the target, before temperature and filters."""

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Tokens of one request that leave after one round."""

    request_id: RequestId
    tokens: tuple[TokenId, ...]
    num_accepted: int
    """The first `num_accepted` of them were drafted; the rest is the verifier's own."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_cached_prompt_tokens: int = 0
    queue_s: float | None = None
    """On the first emission: seconds from arrival to the first round, where the engine knows."""
    error: str | None = None
    submission: int = 0
    """Its request's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderCounts:
    """What became of the texts that were meant to be kept for training."""

    num_written: int
    """Sequences on disk, those included that have made room since."""
    num_dropped: int
    """The disk was too slow, or full."""
    num_bytes: int
    """Of the folder's shards now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank exchanged with others, and how long it waited for them."""

    sent_bytes: Annotated[int, Meta(ge=0)] = 0
    received_bytes: Annotated[int, Meta(ge=0)] = 0
    wait_s: float = 0.0
    """0 for what lies on a GPU: there a wait orders streams and the host runs on."""

    def since(self, earlier: "Traffic") -> "Traffic":
        """What came to it after `earlier` was read. A new epoch counts from zero."""
        if self.sent_bytes < earlier.sent_bytes or self.wait_s < earlier.wait_s:
            return self
        return Traffic(
            sent_bytes=self.sent_bytes - earlier.sent_bytes,
            received_bytes=self.received_bytes - earlier.received_bytes,
            wait_s=self.wait_s - earlier.wait_s,
        )


NO_TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How much of a rank's share of a checkpoint is in memory."""

    bytes_done: int
    bytes_total: int
    """As the files hold them, known from their headers before any data is read."""
    piece: str
    """Packed last: a layer, the embedding or the LM head; empty before the first."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """Where the time of one round went, and what came of it. Units are seconds and counts."""

    round_id: int
    microbatch: int
    num_requests: int
    num_rows: int
    num_prefill_rows: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    plan_s: float
    draft_s: float
    transfer_s: float
    """Time in flight that was neither drafting here nor computing on the verify rank, nor waiting
    for the round before it."""
    verify_s: float
    """On verify rank 0, its waits for the other ranks included."""
    commit_s: float
    started_unix_s: float
    sent_bytes: int = 0
    """To verify rank 0: header and hidden states."""
    received_bytes: int = 0
    """From it: the verdicts."""
    queued_s: float = 0.0
    """Sent, and behind another round whose verdict was still to come."""
    waited_s: float = 0.0
    """The loop's own time for sending the round and waiting for its verdict. Less than the round's
    time in flight where other work was done meanwhile."""
    ahead_s: float = 0.0
    """The loop's own time for drafting on past the draft while the verdict was under way."""
    idle_s: float = 0.0
    """Since the verdict before this one: nobody had anything to do."""
    other_s: float = 0.0
    """Since the verdict before this one: whatever the loop's wall clock shows beyond the rest."""
    verify_group: Traffic = NO_TRAFFIC
    """Verify rank 0 with the other verify ranks, in this round."""
    draft_group: Traffic = NO_TRAFFIC
    """Draft rank 0 with the other draft ranks, since the verdict before this one."""
    request_ids: tuple[RequestId, ...] = ()
    traceparents: tuple[str | None, ...] = ()
    trace_id: int = 0
    """Identity of the round's span, as its header carried it to the verify ranks; 0: no trace."""
    span_id: int = 0
    drafted_by_position: tuple[int, ...] = field(default=())
    """How many requests' drafts were longer than so many tokens, or deeper than so many levels."""
    accepted_by_position: tuple[int, ...] = field(default=())
    """Of those, the ones in which so much and one token more was accepted."""

    @property
    def collective_s(self) -> float:
        """Of `verify_s`: waiting for other verify ranks."""
        return self.verify_group.wait_s

    @property
    def total_s(self) -> float:
        return (
            self.plan_s
            + self.draft_s
            + self.queued_s
            + self.transfer_s
            + self.verify_s
            + self.commit_s
        )
