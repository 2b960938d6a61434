"""What the rest of the system may know of how ranks talk.

A `TensorGroup` holds one stage's ranks together (collectives of a tensor-parallel layer); a
`VerifyChannel` is the draft stage's end of the pipeline of two. Each has an in-process and a
torch.distributed implementation. Every wait inside them has a deadline and its error, `PeerLost`,
names the peer.

What travels is a `Record`. Its annotations are the bounds that `transport.wire` enforces where a
message is read; building a record checks nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from torch import Tensor

from eesd_dist.trees import depths_of, is_chain
from eesd_dist.types import NO_TRAFFIC, Traffic

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A count, token id, page or slot: none is negative and all fit 32 bits."""
Unsigned = Annotated[int, Meta(ge=0)]
"""0 to 2**64 - 1: msgpack has no larger integer."""
Parents = tuple[Annotated[int, Meta(ge=-1)], ...]
Move = tuple[Count, Count]
"""A slot whose keys and values have to go to another: (from, to)."""


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that travels between ranks, written as its fields in order."""


class TensorGroup(Protocol):
    """The ranks that hold one stage together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, the same bits on every rank; may work in place."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x (equal shapes), in rank order."""
        ...

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor: ...


class RowSegment(Record, frozen=True):
    """One request's rows, at consecutive KV slots [start, start + num_rows) of its page table.

    A row's KV slot is its position in the text, except in a drafted tree: its tokens lie behind the
    known ones in the order they were drafted, wherever in the text they would stand.
    """

    start: Count
    num_rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    pages: Sequence[Count]
    """Page table covering KV slots [0, start + num_rows), in order."""
    parents: Parents = ()
    """Of a drafted tree that ends with this segment's last row: which of its tokens each follows,
    -1 being the last known one. Tokens computed earlier in the round are named too. Empty where
    every row follows the one before it."""

    @property
    def first_drafted(self) -> int:
        """The KV slot of the tree's first token; its position too."""
        return self.start + self.num_rows - len(self.parents)

    @property
    def is_tree(self) -> bool:
        return not is_chain(self.parents)

    @property
    def positions(self) -> list[int]:
        """Of each row, in the text."""
        kv_slots = range(self.start, self.start + self.num_rows)
        if not self.is_tree:
            return list(kv_slots)
        first = self.first_drafted
        depths = depths_of(self.parents)
        return [at if at < first else first - 1 + depths[at - first] for at in kv_slots]

    def slot(self, kv_slot: int, *, page_size: int) -> int:
        return self.pages[kv_slot // page_size] * page_size + kv_slot % page_size


class Segment(Record, frozen=True, kw_only=True):
    """One request's rows in a round, at KV slots [start, start + num_rows) of its page table.

    The last `num_sampled` rows get a verdict (0 in the middle of a prefill). `tokens` are the input
    tokens of the segment's rows. A row's KV slot is its position, and its verdict is about the
    position after it, except in a tree: there known rows come first and drafted ones follow in the
    order they were drafted, each standing one position after its parent.
    """

    start: Count
    num_rows: Count
    num_sampled: Count
    pages: tuple[Count, ...]
    """Page table covering KV slots [0, start + num_rows)."""
    tokens: tuple[Count, ...]
    """The token at each row; a later row's history includes them."""
    history: tuple[Count, ...]
    """Tokens before `start`, only when the sampling needs them (penalties); else empty."""
    num_prompt: Count
    """Prompt length: penalties on output count from here, min_tokens too."""
    temperature: float
    top_p: float
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: Unsigned
    min_tokens: Count
    stop_token_ids: tuple[Count, ...]
    """Forbidden while fewer than min_tokens were generated."""
    logit_bias: tuple[tuple[Count, float], ...]
    top_logprobs: Count | None
    """None: no log-probabilities wanted."""
    parents: Parents = ()
    """Of a tree: the drafted row each drafted row follows, -1 being the last known one. Empty for a
    chain, where every row follows the one before it."""

    @property
    def num_known(self) -> int:
        """Rows before the tree; all of a chain's."""
        return self.num_rows - len(self.parents)


class RoundHeader(Record, frozen=True, kw_only=True):
    """All a verify rank needs to know of a round; it has no opinion of its own."""

    epoch: int
    round_id: int
    segments: tuple[Segment, ...]
    trace_id: Annotated[bytes, Meta(min_length=16, max_length=16)] = bytes(16)
    """Trace and span id of the round's span, 0 when it is not traced."""
    span_id: Unsigned = 0
    wants_rejection: bool = False
    """Rejection sampling: draft probabilities [num drafted rows, V] travel beside hidden states."""
    kv_moves: tuple[Move, ...] = ()
    """Slots to copy before this round's rows: accepted branches of earlier rounds take
    their KV slots in the text. All are read before one is written."""

    @property
    def num_rows(self) -> int:
        return sum(s.num_rows for s in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(s.num_sampled for s in self.segments)


class VerifyReply(Record, frozen=True, kw_only=True):
    """The verifier's choices, one per sampled row in the order of the segments."""

    round_id: int
    tokens: Ints
    """[S] the target's token after each sampled row."""
    accepted: Ints
    """[S] 1 where the row's *next* drafted token survived; empty unless rejection sampling."""
    logprobs: Floats
    """[S] log-probability of `tokens`; empty when no segment wants them."""
    top_ids: Ints
    """[S, n] best alternatives, n the largest top_logprobs of the round; (S, 0) if none."""
    top_logprobs: Floats
    verify_s: float
    """Seconds the verify rank worked on it, on its own clock, waits for other ranks included."""
    received_to_sent_s: float
    """Seconds from having the whole message to sending the reply."""
    group: Traffic = NO_TRAFFIC
    """Between verify rank 0 and the other verify ranks, in this round."""
    wire_bytes: int = 0
    """The size it arrived in; 0 where it has not travelled."""


class VerifyChannel(Protocol):
    """The draft stage's end: rounds go out, replies come back in the same order."""

    @property
    def peer(self) -> str: ...
    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        """Starts a round; returns the bytes sent. Does not wait for the reply."""
        ...

    def receive(self) -> VerifyReply:
        """Waits for the oldest outstanding reply; raises PeerLost after the deadline."""
        ...

    def reply_is_here(self) -> bool:
        """Whether `receive` would return at once."""
        ...

    def close(self) -> None: ...


class RoundSource(Protocol):
    """The verify rank's end."""

    def next_round(self) -> tuple[RoundHeader, Tensor, Tensor | None] | None:
        """The next round, or None when the draft stage has closed the channel."""
        ...

    def reply(self, reply: VerifyReply) -> None: ...
