"""Tensor computation of the draft stage, on one rank or on several.

Rank 0 is the drafting actor. It owns scheduler, controllers, page tables and sampling, and sends
each operation to the other ranks as a command before it computes its own part. The other ranks hold
their part of layers [0, N) and of the exit head, with the KV pages of both, and run the commands.
The order of operations is decided in `stage.py`.
"""

# Shapes: T rows, A frontier tokens, D hidden size, V vocabulary (or the draft vocabulary).

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eesd_dist.backends.api import ChainDrafter, engine_on
from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.backends.row_slices import uploaded
from eesd_dist.config import Numerics
from eesd_dist.engine.drafting.chain_commands import LeadingDrafter, chains_of
from eesd_dist.errors import CheckpointError, ConfigError, WireError
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.heads.head_config import HeadIdentity
from eesd_dist.model.layers.paged_layers import LayerRows
from eesd_dist.model.span import LlamaSpan
from eesd_dist.transport.command_stream import CommandSink, CommandSource
from eesd_dist.transport.commands import (
    Command,
    DraftChains,
    MoveSlots,
    RunHead,
    RunLayers,
    RunLogits,
    StoreHeadKv,
    TakeHead,
)
from eesd_dist.transport.contracts import TensorGroup


class DraftCompute(Protocol):
    """Operations of layers and exit head that drafting needs."""

    @property
    def span(self) -> LlamaSpan: ...
    @property
    def head(self) -> ExitHead | None: ...
    @property
    def group(self) -> TensorGroup: ...

    @property
    def drafter(self) -> ChainDrafter | None:
        """Layers and head as one call for a round; None where there is none."""
        ...

    def run_layers(
        self,
        tokens: Sequence[int],
        segments: Sequence[RowSegment],
        *,
        layer_rows: LayerRows | None = None,
    ) -> Tensor:
        """Returns the rows after layer N."""
        ...

    def run_head(self, hidden_TD: Tensor, segments: Sequence[RowSegment]) -> Tensor:
        """Runs the exit head's layer; writes its keys and values."""
        ...

    def store_head_kv(self, hidden_TD: Tensor, segments: Sequence[RowSegment]) -> None:
        """Writes the exit head's keys and values of rows after which nothing is guessed."""
        ...

    def logits(self, exit_AD: Tensor) -> Tensor:
        """Returns logits [A, V] of rows that `run_head` returned."""
        ...

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots, (from, to) each, in the pages of the layers and of the head."""
        ...

    def take_head(self, head: ExitHead) -> None:
        """Replaces the exit head by one that takes over its pages."""
        ...

    def begin(self) -> None:
        """Starts an epoch: the ranks may be different ones, and no page is valid yet."""
        ...

    def check(self) -> None:
        """Raises PeerLost if earlier results must not be used, since a rank is lost."""
        ...

    def close(self) -> None: ...


class DraftShard:
    """Layers and exit head of one rank; the whole stage if it is the only one."""

    def __init__(
        self,
        *,
        span: LlamaSpan,
        head: ExitHead | None,
        group: TensorGroup,
        num_pages: int,
        page_size: int,
        device: torch.device,
        numerics: Numerics,
        compiles_in_background: bool = False,
    ) -> None:
        """`compiles_in_background`: if the kernel is not cached, work starts without the compiled
        call, but for a group of ranks."""
        self.span = span
        self.head = head
        self.group = group
        self.num_pages = num_pages
        self.page_size = page_size
        self._device = device
        self._numerics: Numerics = numerics
        self._segments: list[RowSegment] = []
        self._rows: RowPlan | None = None
        """Plan of `_segments`, the rows computed last; None before the first rows."""
        self._compiles_in_background = compiles_in_background
        self._round_drafter = self._drafter_of(head)

    @property
    def drafter(self) -> ChainDrafter | None:
        drafter = self._round_drafter.get()
        return drafter if drafter is not None and drafter.is_usable else None

    def run_layers(
        self,
        tokens: Sequence[int],
        segments: Sequence[RowSegment],
        *,
        layer_rows: LayerRows | None = None,
    ) -> Tensor:
        tokens_T = uploaded(tokens, self._device)
        return self.span.forward(
            self.span.embed(tokens_T), self._plan(segments), layer_rows=layer_rows
        )

    def run_head(self, hidden_TD: Tensor, segments: Sequence[RowSegment]) -> Tensor:
        return self._own_head.forward(hidden_TD, self._plan(segments))

    def store_head_kv(self, hidden_TD: Tensor, segments: Sequence[RowSegment]) -> None:
        self._own_head.store_kv(hidden_TD, self._plan(segments))

    def logits(self, exit_AD: Tensor) -> Tensor:
        return self._own_head.logits(exit_AD)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        self.span.move(moves)
        if self.head is not None:
            self.head.move(moves)

    def take_head(self, head: ExitHead) -> None:
        if self.head is not None:
            head.take_pages(self.head)
        self.head = head
        self._round_drafter = self._drafter_of(head)

    def begin(self) -> None:
        self.span.paged.begin()
        if self.head is not None:
            self.head.paged.begin()

    def check(self) -> None:
        return

    def close(self) -> None:
        return

    @property
    def _own_head(self) -> ExitHead:
        if self.head is None:
            raise ConfigError(
                "rank 0 of the draft stage drafts with an exit head and this rank has none: start "
                "every rank with the same configuration"
            )
        return self.head

    def _drafter_of(self, head: ExitHead | None) -> LazyCompiled[ChainDrafter]:
        """Returns layers and head as one call for a round, where this machine and stage have it."""
        if head is None:
            return LazyCompiled.without()
        return engine_on(self._device).drafter(
            self.span, head, compiles_in_background=self._compiles_in_background
        )

    def _plan(self, segments: Sequence[RowSegment]) -> RowPlan:
        """Returns the plan, built once for span and exit head if both run the same rows."""
        if segments != self._segments or self._rows is None:
            self._segments = list(segments)
            self._rows = RowPlan.build(
                segments,
                page_size=self.page_size,
                device=self._device,
                numerics=self._numerics,
            )
        return self._rows


class LeadingShard:
    """Rank 0 of several: sends each operation to the other ranks, then computes its own part."""

    def __init__(self, own: DraftShard, commands: CommandSink) -> None:
        self._own = own
        self._commands = commands
        self.begin()

    @property
    def span(self) -> LlamaSpan:
        return self._own.span

    @property
    def head(self) -> ExitHead | None:
        return self._own.head

    @property
    def group(self) -> TensorGroup:
        return self._own.group

    @property
    def drafter(self) -> ChainDrafter | None:
        own = self._own.drafter
        return None if own is None else LeadingDrafter(own, self._commands)

    def run_layers(
        self,
        tokens: Sequence[int],
        segments: Sequence[RowSegment],
        *,
        layer_rows: LayerRows | None = None,
    ) -> Tensor:
        self._commands.announce(RunLayers(tokens=tokens, segments=segments))
        # Every rank has all channels of a row: this one's copy is enough.
        return self._own.run_layers(tokens, segments, layer_rows=layer_rows)

    def run_head(self, hidden_TD: Tensor, segments: Sequence[RowSegment]) -> Tensor:
        self._commands.announce(RunHead(segments=segments, hidden_TD=hidden_TD))
        return self._own.run_head(hidden_TD, segments)

    def store_head_kv(self, hidden_TD: Tensor, segments: Sequence[RowSegment]) -> None:
        self._commands.announce(StoreHeadKv(segments=segments, hidden_TD=hidden_TD))
        self._own.store_head_kv(hidden_TD, segments)

    def logits(self, exit_AD: Tensor) -> Tensor:
        self._commands.announce(RunLogits(exit_AD=exit_AD))
        return self._own.logits(exit_AD)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        if moves:
            self._commands.announce(MoveSlots(moves=moves))
            self._own.move(moves)

    def take_head(self, head: ExitHead) -> None:
        self._own.take_head(head)
        self._agree_on_head()

    def begin(self) -> None:
        self._own.begin()
        self._agree_on_head()

    def check(self) -> None:
        self._commands.check()

    def close(self) -> None:
        self._commands.close()

    def _agree_on_head(self) -> None:
        head = self._own.head
        if head is not None:
            assert head.identity is not None, "a part of a head has the identity of its files"
            self._commands.announce(
                TakeHead(folder=head.identity.folder, sha256=head.identity.sha256)
            )


class HeadShelf:
    """Holds a follower's part of the next exit head, loaded ahead of time.

    A head that was not loaded ahead is loaded on the command, while all ranks wait for it.
    """

    def __init__(self, load: Callable[[Path], ExitHead]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._aside: ExitHead | None = None

    def put_aside(self, folder: Path) -> HeadIdentity:
        """Loads a head, from any thread.

        Raises CheckpointError or ConfigError for a head that does not fit.
        """
        head = self._load(folder)
        with self._lock:
            self._aside = head
        assert head.identity is not None
        return head.identity

    def take(self, command: TakeHead) -> ExitHead:
        with self._lock:
            head, self._aside = self._aside, None
        if head is None or not _is(head, command):
            head = self._load(Path(command.folder))
        if not _is(head, command):
            digest = "none" if head.identity is None else head.identity.sha256[:12]
            raise CheckpointError(
                file=command.folder,
                found=f"an exit head {digest} on this node",
                expected=f"{command.sha256[:12]}, which rank 0 of the draft stage read there",
                advice="put the same files on every node and restart the service",
            )
        return head


def follow_commands(shard: DraftShard, source: CommandSource, *, heads: HeadShelf) -> None:
    """Runs a follower's loop. Returns when rank 0 closes, raises PeerLost when a rank is lost."""
    while (command := source.next_command()) is not None:
        _obey(command, shard, heads)


@torch.inference_mode()
def _obey(command: Command, shard: DraftShard, heads: HeadShelf) -> None:
    match command:
        case RunLayers(tokens=tokens, segments=segments):
            _expect_below("token", max(tokens), shard.span.spec.vocab_size)
            _expect_pages(segments, shard)
            shard.run_layers(tokens, segments)
        case RunHead(segments=segments, hidden_TD=hidden_TD):
            _expect_rows(hidden_TD, shard.span)
            _expect_pages(segments, shard)
            shard.run_head(hidden_TD, segments)
        case StoreHeadKv(segments=segments, hidden_TD=hidden_TD):
            _expect_rows(hidden_TD, shard.span)
            _expect_pages(segments, shard)
            shard.store_head_kv(hidden_TD, segments)
        case RunLogits(exit_AD=exit_AD):
            _expect_rows(exit_AD, shard.span)
            shard.logits(exit_AD)
        case DraftChains():
            _draft(command, shard)
        case MoveSlots(moves=moves):
            highest = max(max(move) for move in moves)
            _expect_below("slot", highest, shard.num_pages * shard.page_size)
            shard.move(moves)
        case TakeHead():
            if shard.head is None or not _is(shard.head, command):
                shard.take_head(heads.take(command))


def _draft(command: DraftChains, shard: DraftShard) -> None:
    """Drafts with the other ranks. Raises WireError for a command that does not fit this stage."""
    if command.lagging_LD is not None:
        _expect_rows(command.lagging_LD, shard.span)
    for chain in command.chains:
        _expect_below("token", max(chain.tokens), shard.span.spec.vocab_size)
        _expect_pages([chain.segment], shard, num_more=chain.max_draft)
        if chain.mask and len(chain.mask) != 4 * (-(-shard.span.spec.vocab_size // 32)):
            raise WireError(f"found a mask of {len(chain.mask)} bytes, expected a bit a token")
    drafter = shard.drafter
    if drafter is None:
        raise WireError(
            "found a round to be drafted in one call, which this rank cannot: start every rank "
            "with the same configuration"
        )
    drafter.draft(chains_of(command))


def _expect_pages(segments: Sequence[RowSegment], shard: DraftShard, *, num_more: int = 0) -> None:
    """`num_more`: rows that may follow each segment."""
    for rows in segments:
        _expect_below("page", max(rows.pages, default=0), shard.num_pages)
        last = rows.start + rows.num_rows - 1 + num_more
        _expect_below("KV slot", last, len(rows.pages) * shard.page_size)


def _expect_rows(x_TD: Tensor, span: LlamaSpan) -> None:
    actual = x_TD.shape[-1], x_TD.dtype
    expected = span.spec.hidden_size, span.compute_dtype
    if actual != expected:
        raise WireError(
            f"found rows of {actual[0]} x {actual[1]} with a command, expected "
            f"{expected[0]} x {expected[1]}: start every rank with the same configuration"
        )


def _expect_below(what: str, number: int, limit: int) -> None:
    if number >= limit:
        raise WireError(f"found {what} {number} in a command, expected less than {limit}")


def _is(head: ExitHead, command: TakeHead) -> bool:
    return head.identity is not None and head.identity.sha256 == command.sha256
