"""Values shared by all packages: requests, drafts, verdicts, outcomes, statistics.

Frozen, without tensors and without text: the engine works on token ids. Independent of Ray, torch
and HTTP.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal, NamedTuple, NewType

from msgspec import Meta, Struct

TokenId = NewType("TokenId", int)
RequestId = NewType("RequestId", str)
PageId = NewType("PageId", int)

DType = Literal["float32", "bfloat16", "float16"]
DTypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Numerics = Literal["invariant", "fast"]
StopRule = Literal["auto", "bernoulli", "optimal"]


Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A count, token id, page or slot: none is negative and all fit 32 bits."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0, as in vLLM: dividing by them overflows."""
_WIDE_TOP_P, _WIDE_MIN_P, _WIDE_TOP_K = 0.9, 0.05, 20
"""Filters from here on, or up to here, keep nearly all probability."""


class Value(Struct, frozen=True):
    """Base of values that are made for every request or token of a round: building a Struct takes a
    seventh of the time of a frozen dataclass."""


class ChoiceParams(Value, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Parameters for choosing a token from its logits, as in the OpenAI API and in vLLM.

    All that the verify stage needs of a request's `SamplingParams`; the bounds hold for messages.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[Count, float], ...] = ()
    seed: int = 0
    """Noise is keyed by (seed, position, token): the same seed gives the same text on any machine.
    All of its 64 bits count; -1 and 2**64 - 1 are one seed."""
    min_tokens: Count = 0
    stop_token_ids: tuple[Count, ...] = ()
    """Tokens that end the text, including the model's end tokens unless `ignore_eos` is set.
    Forbidden while fewer than `min_tokens` were generated."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def noise_temperature(self) -> float:
        """The temperature; 0 where the choice is greedy and has no noise."""
        return 0.0 if self.is_greedy else self.temperature

    @property
    def is_filtered(self) -> bool:
        """True if tokens are filtered by rank or mass, which never affects a greedy choice."""
        has_filters = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
        return has_filters and not self.is_greedy

    @property
    def is_narrow(self) -> bool:
        """True if filters may take away much of the probability."""
        return self.is_filtered and (
            self.top_p < _WIDE_TOP_P or self.min_p > _WIDE_MIN_P or 0 < self.top_k < _WIDE_TOP_K
        )

    @property
    def needs_history(self) -> bool:
        """True if the choice depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def edits_logits(self) -> bool:
        """True if single logits change before the temperature, at any position."""
        return bool(self.logit_bias) or self.needs_history


class SamplingParams(ChoiceParams, frozen=True, kw_only=True, array_like=False):
    """Parameters of a request: those of each choice, its length, and what is reported."""

    max_tokens: int = 16
    top_logprobs: int | None = None
    """Number of alternatives to report with each token's log-probability; None reports nothing."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each token of the prompt but the
    first; None reports nothing."""
    grammar: str | None = None
    """Grammar that the text must match, as `text.grammars` writes it; None: any text."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None: any."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the text must not have."""

    @property
    def choice_params(self) -> ChoiceParams:
        """The parameters of choices alone, as headers of rounds have them."""
        values = {name: getattr(self, name) for name in ChoiceParams.__struct_fields__}
        return ChoiceParams(**values)


TreeShape = Literal["none", "static", "dynamic"]
"""A draft is a chain, a tree of fixed widths, or one that grows where it is likely to survive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Speculation options of one request. They change how long a text takes, never the text."""

    mode: Literal["off", "auto"] = "auto"
    controller: str | None = None
    """Name in `control.registry`; None takes the service's default."""
    max_draft_tokens: int | None = None
    """None takes the service's ceiling."""
    tree: TreeShape | None = None
    """None takes the service's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """Features to return of every row of a request's text, for training a head."""

    exits: tuple[int, ...]
    """Layers after which hidden states are returned, ascending."""
    top_k: int
    """Number of the target's best tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The prompt, parameters, seed and tokens so far. All other state can be recomputed."""

    request_id: RequestId
    prompt: tuple[TokenId, ...]
    sampling: SamplingParams
    speculation: SpeculationParams = SpeculationParams()
    generated: tuple[TokenId, ...] = ()
    """Tokens generated so far, when a request is resumed."""
    workload: str = "default"
    """The class of which the pooled prior is used for this request's belief."""
    traceparent: str | None = None
    """W3C trace context of the HTTP request this belongs to."""
    crashes: int = 0
    """Number of crashes that engines reported with it since its last token, in any pipeline."""
    is_suspect: bool = False
    """True while the request is quarantined: it may be the cause, and runs alone until its next
    token."""
    submission: int = 0
    """Number of this submission to an engine; later ones are higher. Emissions have it too, since
    those of an earlier submission may still arrive."""
    is_continued: bool = False
    """True if its client has begun to get other texts of the same HTTP request: where there is no
    room it waits, since refusing it would end them too."""
    caller: str = ""
    """The name of the API key that it came with. Callers share an engine fairly."""
    cache_salt: str = field(default="", repr=False)
    """Secret salt: only requests with the same one find each other's prefixes in the KV cache."""
    weight: float = 1.0
    """Weight of its caller: twice the weight is twice the share."""
    priority: int = 0
    """Requests of a lower number come first, and take the place of those of a higher one."""
    resume_window_s: float = 0.0
    """Seconds for which its emissions are kept after the end of its stream, for a client that
    resumes it."""
    flush_interval_s: float | None = 0.0
    """Time for which its tokens gather since its last batch; the first and the last ones are sent
    at once. None: with those of the client's other requests, for an interval by load."""
    resumption: int = 0
    """Time when a client resumed its stream, in Unix nanoseconds: the latest one is served; 0:
    never."""
    features: FeatureSpec | None = None
    """Set by an operator's `eesd distill` only; no HTTP request can. It never changes the text."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if its first emission has them; a request that goes on has emitted them before."""
        return self.sampling.prompt_logprobs is not None and not self.generated


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Evidence(Value, frozen=True, kw_only=True):
    """The exit head's certainty about the token it would draft next.

    Computed before the token is drafted. A controller may use all of it and cannot bias the text,
    since every token is verified by the rule of coupled sampling.
    """

    depth: int
    """Number of tokens that this draft already has."""
    top1_prob: float = 1.0
    """Probability of the head's likeliest token; computed only for controllers that use it."""
    temperature: float = 0.0
    """Temperature of the request; 0 for a greedy choice."""
    gap: float = 0.0
    """Score of the drafted token minus that of the runner-up, noise included: the larger, the more
    the target's logits must differ for another choice. In units of the Gumbel noise (logits over
    temperature); at temperature 0 plain logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verification outcome of one draft."""

    num_drafted: int
    num_accepted: int
    next_token: TokenId
    """The verifier's own token: recovered after a rejection, bonus otherwise."""

    @property
    def rejected(self) -> bool:
        return self.num_accepted < self.num_drafted


class Branch(Value, frozen=True, kw_only=True):
    """A node on the verified path of a drafted tree: its drafted children and the choice."""

    depth: int
    """Number of drafted tokens before it."""
    num_offered: int
    """Number of tokens drafted after it: the exit head's first choice, then its next ones."""
    chosen_rank: int
    """Index among them of the verifier's token; -1: not among them."""
    evidence: Evidence
    """The exit head's evidence at this node."""


class Outcome(Value, frozen=True, kw_only=True):
    """Result of one request's round for controllers: counts and evidence, no text."""

    request_id: RequestId
    num_drafted: int
    num_accepted: int
    evidence: tuple[Evidence, ...] = ()
    """Evidence for each token of a chain that the exit head drafted, in order; empty for a tree,
    where branches have it."""
    is_lookup: bool = False
    """True if the tokens were found by prompt lookup: the exit head was not asked."""
    branches: tuple[Branch, ...] = ()
    """Nodes of a tree with drafted children on the verified path, from the root on."""

    @property
    def num_first_accepted(self) -> int:
        """Number of times that the exit head's first choice was accepted."""
        if self.is_lookup:
            return 0
        if self.branches:
            return sum(branch.chosen_rank == 0 for branch in self.branches)
        return self.num_accepted

    @property
    def num_first_rejected(self) -> int:
        """Number of times that it was rejected; tokens after a rejected one are not judged."""
        if self.is_lookup:
            return 0
        if self.branches:
            return sum(branch.chosen_rank != 0 for branch in self.branches)
        return int(self.num_accepted < self.num_drafted)


class TokenLogprobs(Value, frozen=True, kw_only=True):
    """Log-probabilities under the target, before temperature and filters."""

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class Emission(Value, frozen=True, kw_only=True):
    """Tokens of one request that leave after one round."""

    request_id: RequestId
    tokens: tuple[TokenId, ...]
    num_accepted: int
    """The first `num_accepted` tokens were drafted; the rest are the verifier's own."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_cached_prompt_tokens: int = 0
    queue_s: float | None = None
    """Seconds from arrival to the first round, on the first emission, where known."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens but the first, on the first emission, where asked
    for."""
    error: str | None = None
    """Reason in the request itself that makes it impossible to go on; with ABORT."""
    submission: int = 0
    """Submission of its request."""
    num_interruptions: int = 0
    """Attempts at its request that ended before their last token; counted by the ingress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderCounts:
    """Counts of the texts recorded for training."""

    num_written: int
    """Sequences written, including those deleted since to make room."""
    num_dropped: int
    """Sequences dropped because the disk was too slow or full."""
    num_bytes: int
    """Present size of the folder's shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes one rank exchanged with others, and the time it waited for them."""

    sent_bytes: Annotated[int, Meta(ge=0)] = 0
    received_bytes: Annotated[int, Meta(ge=0)] = 0
    wait_s: float = 0.0
    """0 for tensors on a GPU, where a wait only orders streams."""

    def since(self, earlier: "Traffic") -> "Traffic":
        """Returns the traffic since `earlier` was read. A new epoch counts from zero."""
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
    """Progress of loading a rank's shard of a checkpoint."""

    bytes_done: int
    bytes_total: int
    """Size in the files, known from their headers before any data is read."""
    piece: str
    """The last piece loaded: a layer, the embedding or the LM head; empty before the first."""
    seconds: float
    waited_s: float = 0.0
    """Part of `seconds` in which packing waited for a piece to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrace:
    """Which traces a round is written to."""

    trace_id: int = 0
    """Id of the first of them, as the round's header tells it to the verify ranks; 0: none."""
    span_id: int = 0
    """Id of the round's span there."""
    parents: tuple[str, ...] = ()
    """A traceparent for each trace: of its requests, those that are sampled."""


NO_TRACE = RoundTrace()


class DrafterUse(NamedTuple):
    """Names the drafter that used the exit head for a request."""

    drafter: str
    """`compiled`: one call on CPUs; `graph`: on a GPU; `levels`: level by level."""
    reason: str
    """Reason for drafting level by level (`engine.drafting.choose.LevelReason`), or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """Times and results of one round, in seconds and counts."""

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
    """Time in flight except drafting, verifying and waiting for the round before it."""
    verify_s: float
    """Time on verify rank 0, including its waits for the other ranks."""
    commit_s: float
    started_unix_s: float
    elapsed_s: float
    """Seconds from the start of planning to the end of the commit, with what the loop did for other
    rounds in between."""
    num_lookup_drafted: int = 0
    """Number of drafted tokens that were found by prompt lookup."""
    num_lookup_accepted: int = 0
    sent_bytes: int = 0
    """Bytes sent to verify rank 0: header and hidden states."""
    received_bytes: int = 0
    """Bytes received from verify rank 0: the verdicts."""
    queued_s: float = 0.0
    """Time after sending during which an earlier round's verdict was still outstanding."""
    waited_s: float = 0.0
    """The loop's time for sending the round and waiting for its verdict. Less than the round's time
    in flight where the loop did other work in between."""
    idle_s: float = 0.0
    """Time without work since the previous verdict."""
    other_s: float = 0.0
    """Time since the previous verdict that no other field accounts for."""
    verify_group: Traffic = NO_TRAFFIC
    """Verify rank 0 with the other verify ranks, in this round."""
    draft_group: Traffic = NO_TRAFFIC
    """Draft rank 0 with the other draft ranks, since the previous verdict."""
    request_ids: tuple[RequestId, ...] = ()
    trace: RoundTrace = NO_TRACE
    drafted_by_position: tuple[int, ...] = field(default=())
    """Entry i: number of drafts with more than i tokens, or levels of a tree."""
    accepted_by_position: tuple[int, ...] = field(default=())
    """Entry i: number of those with more than i tokens accepted."""
    drafters: tuple[tuple[DrafterUse, int], ...] = ()
    """Number of requests that each drafter drafted for."""

    @property
    def collective_s(self) -> float:
        """The part of `verify_s` spent waiting for other verify ranks."""
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
