"""The interface of the transport layer, and the records that travel over it.

A `TensorGroup` runs the collectives of one stage's tensor-parallel ranks. A `VerifyChannel` is the
draft stage's end of its link to the verify stage. Each has an in-process and a torch.distributed
implementation. Every wait has a deadline and raises `PeerLost`, which names the peer.

Messages are `Record`s. `transport.wire` enforces the bounds in their annotations when it reads a
message; building a record checks nothing.
"""

from typing import Annotated, Any, Protocol

import numpy as np
from msgspec import Meta, Struct
from torch import Tensor

from eesd_dist.page_table import PageTable
from eesd_dist.trees import depths_of, is_chain
from eesd_dist.types import NO_TRAFFIC, ChoiceParams, Count, Traffic

# Written out: from NumPy 2.5 on `npt.NDArray` is a name for this type, and not equal to it.
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]
Doubles = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

Unsigned = Annotated[int, Meta(ge=0)]
"""0 to 2**64 - 1: msgpack has no larger integer."""
Parents = tuple[Annotated[int, Meta(ge=-1)], ...]
Move = tuple[Count, Count]
"""A copy of one slot's keys and values to another slot: (from, to)."""


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that travels between ranks, encoded as its fields in order."""


class TensorGroup(Protocol):
    """Collectives over the ranks of one stage."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks, the same bits on every rank; may work in place."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Returns every rank's x (equal shapes), in rank order."""
        ...

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor: ...


class RowSegment(Record, frozen=True):
    """A request's rows, at consecutive KV slots [start, start + num_rows) of its page table.

    A row's KV slot is its position in the text, except in a drafted tree: the tree's tokens follow
    the known ones in the order they were drafted, whatever their positions in the text.
    """

    start: Count
    num_rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    pages: PageTable
    """Page table covering KV slots [0, start + num_rows), in order."""
    parents: Parents = ()
    """The parent of each token of a drafted tree that ends with this segment's last row; -1 is the
    last known token. Includes tokens computed earlier in the round. Empty where every row follows
    the one before it."""

    @property
    def first_drafted(self) -> int:
        """The KV slot of the tree's first token, which is also its position."""
        return self.start + self.num_rows - len(self.parents)

    @property
    def is_tree(self) -> bool:
        return not is_chain(self.parents)

    @property
    def positions(self) -> list[int]:
        """The position of each row in the text."""
        kv_slots = range(self.start, self.start + self.num_rows)
        if not self.is_tree:
            return list(kv_slots)
        first = self.first_drafted
        depths = depths_of(self.parents)
        return [at if at < first else first - 1 + depths[at - first] for at in kv_slots]

    def slot(self, kv_slot: int, *, page_size: int) -> int:
        return self.pages[kv_slot // page_size] * page_size + kv_slot % page_size


class Segment(Record, frozen=True, kw_only=True):
    """A request's rows in a round, at KV slots [start, start + num_rows) of its page table.

    The last `num_sampled` rows get a verdict (0 in the middle of a prefill). `tokens` are the input
    tokens of the segment's rows. A row's KV slot is its position, and its verdict is about the
    position after it. In a tree known rows come first and drafted rows follow in the order they
    were drafted; the position of a drafted row is one after its parent's.
    """

    start: Count
    num_rows: Count
    num_sampled: Count
    pages: PageTable
    """Page table covering KV slots [0, start + num_rows)."""
    tokens: tuple[Count, ...]
    """The input token of each row; part of the history of the rows after it."""
    history: tuple[Count, ...]
    """Tokens before `start` when sampling needs them (penalties); else empty."""
    num_prompt: Count
    """Prompt length: output penalties and min_tokens count from here."""
    params: ChoiceParams
    top_logprobs: Count | None = None
    """None: no log-probabilities requested."""
    parents: Parents = ()
    """Drafted row that each drafted row of a tree follows; -1 is the last known row. Empty for a
    chain, where every row follows the one before it."""
    wants_features: bool = False
    """True if the reply has features of all its rows."""
    forced: tuple[Count, ...] = ()
    """Tokens that follow the segment's first rows, one each: the prompt's own. Their
    log-probabilities are reported."""
    forced_top_logprobs: Count = 0
    """Alternatives to report with each."""
    masks: bytes = b""
    """Masks, one per sampled row, all of one size: a bit per token that may be chosen, the lowest
    bit of the first byte for token 0. Empty: any token."""

    @property
    def num_reported(self) -> int:
        """Number of its rows in the reply: forced ones, then sampled ones."""
        return len(self.forced) + self.num_sampled

    @property
    def num_known(self) -> int:
        """Number of rows before the tree; all rows of a chain."""
        return self.num_rows - len(self.parents)


class RoundHeader(Record, frozen=True, kw_only=True):
    """Everything a verify rank needs to compute a round."""

    epoch: int
    round_id: int
    segments: tuple[Segment, ...]
    trace_id: Annotated[bytes, Meta(min_length=16, max_length=16)] = bytes(16)
    """Trace id of the round's span, 0 when it is not traced; `span_id` likewise."""
    span_id: Unsigned = 0
    wants_rejection: bool = False
    """Rejection sampling: draft probabilities [num drafted rows, V] follow the hidden states."""
    kv_moves: tuple[Move, ...] = ()
    """Slots to copy before this round's rows: accepted branches of earlier rounds move to
    their KV slots in the text. All slots are read before any is written."""
    exits: tuple[Count, ...] = ()
    """Layers of the verify stage after which features have hidden states, ascending."""
    top_k: Count = 0
    """Number of best tokens in the round's features."""

    @property
    def num_rows(self) -> int:
        return sum(s.num_rows for s in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(s.num_sampled for s in self.segments)


class RowFeatures(Record, frozen=True, kw_only=True):
    """Results that the target computed for the rows of all segments that want features, in their
    order."""

    hidden: tuple[Floats, ...]
    """[R, D] per exit of the header: hidden states after that many layers."""
    top_ids: Ints
    """[R, K] the target's best tokens, the best first."""
    top_logits: Floats
    """[R, K]"""
    lse: Floats
    """[R] log-sum-exp of the logits over the whole vocabulary."""


class VerifyReply(Record, frozen=True, kw_only=True):
    """The verifier's choices, in the order of the segments: of each first the rows with a forced
    token, then the sampled ones."""

    round_id: int
    tokens: Ints
    """[S] the target's token after each of these rows."""
    accepted: Ints
    """[S] 1 where the row's *next* drafted token survived; empty unless rejection sampling."""
    logprobs: Floats
    """[S] log-probability of `tokens`; empty when no segment wants them."""
    top_ids: Ints
    """[S, n] best alternatives, n being the round's largest top_logprobs; (S, 0) if none."""
    top_logprobs: Floats
    verify_s: float
    """Seconds verify rank 0 spent on the round, waits for other ranks included, on its clock."""
    received_to_sent_s: float
    """Seconds from the arrival of the complete message to sending the reply."""
    group: Traffic = NO_TRAFFIC
    """Traffic between verify rank 0 and the other verify ranks in this round."""
    wire_bytes: int = 0
    """Size of the message it arrived in; 0 in-process."""
    features: RowFeatures | None = None
    """None where no segment wants any."""


class VerifyChannel(Protocol):
    """The draft stage's end: sends rounds and receives their replies in the same order."""

    @property
    def peer(self) -> str: ...
    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        """Starts sending a round and returns its size in bytes. Does not wait for the reply."""
        ...

    def receive(self) -> VerifyReply:
        """Waits for the oldest outstanding reply; raises PeerLost after the deadline."""
        ...

    def close(self) -> None: ...


class RoundSource(Protocol):
    """The verify rank's end."""

    def next_round(self) -> tuple[RoundHeader, Tensor, Tensor | None] | None:
        """Returns the next round, or None when the draft stage has closed the channel."""
        ...

    def reply(self, reply: VerifyReply) -> None: ...
