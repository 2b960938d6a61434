"""Reads the batches of one rank from a store of features.

The shards are shuffled in every pass and divided among the ranks (`division`). A rank reads windows
of as many of its shards as fit into memory, and shuffles their rows by (seed, epoch, window), as
every rank does, so that rows of similar length meet in a step. Texts longer than a row are split
into rows; rows of similar length are batched together to limit padding, and no row has two texts.

The position is the pass and the step in it, the same on every rank, and is stored in a checkpoint:
the same batches follow it. Does not depend on model, loss or optimizer.
"""

# Shapes: B rows, T positions of the longest row, D hidden size, K best tokens of the target.

import logging
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eesd_dist.distill.features import FeatureSequence, FeatureStore
from eesd_dist.distill.train.division import ShardRows, divided
from eesd_dist.distill.train.losses import KeptTargets
from eesd_dist.errors import ConfigError

logger = logging.getLogger(__name__)

_POOL_BATCHES = 16
"""Number of batches within which rows are sorted by length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Rows of one optimizer step."""

    rows: int
    """Total over all ranks and accumulated micro-batches."""
    length: int
    """Maximum tokens of a row."""
    num_shares: int = 1
    """Number of parts of a batch: ranks times micro-batches."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.length < 1:
            raise ConfigError(
                f"batches of {self.rows} rows of {self.length} tokens: both must be 1 or more"
            )
        if self.rows % self.num_shares:
            raise ConfigError(
                f"{self.rows} rows cannot be split evenly into {self.num_shares} (workers times "
                f"accumulation): use a multiple of {self.num_shares}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of the next batch."""

    epoch: int = 0
    step: int = 0
    """Steps of this pass before it."""
    num_ranks: int | None = None
    """Number of ranks that took them; None at the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A contiguous part of one text. Position t is about the token after it."""

    tokens_T: Tensor
    hidden_TD: Tensor
    top_ids_TK: Tensor
    top_logits_TK: Tensor
    lse_T: Tensor
    num_prompt: int
    """Number of positions about a token of the prompt, which is never drafted."""

    @property
    def length(self) -> int:
        return int(self.tokens_T.shape[0])

    def on(self, device: torch.device | None) -> "Row":
        if device is None:
            return self
        return replace(
            self,
            tokens_T=self.tokens_T.to(device),
            hidden_TD=self.hidden_TD.to(device),
            top_ids_TK=self.top_ids_TK.to(device),
            top_logits_TK=self.top_logits_TK.to(device),
            lse_T=self.lse_T.to(device),
        )

    def copied(self) -> "Row":
        """Returns a row with memory of its own; another one keeps its whole shard in memory."""
        return replace(
            self,
            tokens_T=self.tokens_T.clone(),
            hidden_TD=self.hidden_TD.clone(),
            top_ids_TK=self.top_ids_TK.clone(),
            top_logits_TK=self.top_logits_TK.clone(),
            lse_T=self.lse_T.clone(),
        )

    def weight(self, prompt_weight: float) -> float:
        return prompt_weight * self.num_prompt + (self.length - self.num_prompt)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows as one tensor, the shorter ones padded with weight 0."""

    tokens_BT: Tensor
    hidden_BTD: Tensor
    targets: KeptTargets
    """The target's distributions at B x T positions."""
    weights_BT: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], *, prompt_weight: float, device: torch.device) -> "Batch":
        weights = []
        for row in rows:
            weight_T = torch.ones(row.length)
            weight_T[: row.num_prompt] = prompt_weight
            weights.append(weight_T)

        def padded(tensors: list[Tensor]) -> Tensor:
            return pad_sequence(tensors, batch_first=True).to(device)

        return cls(
            tokens_BT=padded([row.tokens_T for row in rows]),
            hidden_BTD=padded([row.hidden_TD for row in rows]),
            targets=KeptTargets(
                ids_NK=padded([row.top_ids_TK for row in rows]).flatten(0, 1).long(),
                logits_NK=padded([row.top_logits_TK for row in rows]).flatten(0, 1),
                lse_N=padded([row.lse_T for row in rows]).flatten(),
            ),
            weights_BT=padded(weights),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBatch:
    """A rank's rows of one step, and how they are split into micro-batches."""

    rows: Sequence[Row]
    after: Position
    """Position from which to resume after this batch."""

    def share(self, index: int, num_shares: int) -> Sequence[Row]:
        return self.rows[index::num_shares]

    def weight(self, prompt_weight: float) -> float:
        """Returns the weight of these rows."""
        return sum(row.weight(prompt_weight) for row in self.rows)


class BatchReader:
    """Reads an endless sequence of batches: one rank's rows of selected sequences of a store.

    Raises ConfigError if there are fewer rows than ranks.
    """

    def __init__(
        self,
        store: FeatureStore,
        *,
        exit_layer: int,
        only: Collection[int],
        shape: BatchShape,
        seed: int,
        window_bytes: int,
        rank: int = 0,
        num_ranks: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where the rows of a window are held; None: in host memory."""
        if not only:
            raise ConfigError(f"{store.folder}: no sequence is left to train on")
        self._store = store
        self._exit_layer = exit_layer
        self._only = frozenset(only)
        self._length = shape.length
        self._rows_each = shape.rows // num_ranks
        self._seed = seed
        self._window_bytes = window_bytes
        self._rank = rank
        self._num_ranks = num_ranks
        self._device = device
        self._numbers = _numbers(store)
        self._num_rows = self._counted()
        if sum(self._num_rows) < num_ranks:
            raise ConfigError(
                f"{store.folder}: {sum(self._num_rows)} rows cannot be divided among {num_ranks} "
                "workers: use fewer workers, or collect more text"
            )
        self._rows_by_shard: dict[int, list[Row]] = {}
        """Rows of the last window, by shard."""

    def batches(self, start: Position) -> Iterator[PlannedBatch]:
        """Yields this rank's batches from a position of any rank. Every rank has the same number of
        them in a pass."""
        epoch, done = start.epoch, self._steps_done(start)
        while True:
            for step, rows in self._one_pass(epoch, first=done):
                after = Position(epoch=epoch, step=step + 1, num_ranks=self._num_ranks)
                yield PlannedBatch(rows=rows, after=after)
            epoch, done = epoch + 1, 0

    def _steps_done(self, start: Position) -> int:
        if start.num_ranks in (None, self._num_ranks):
            return start.step
        logger.warning(
            "training was at step %d of pass %d with %d workers and goes on with %d: the rows are "
            "divided otherwise, and this pass begins again",
            start.step,
            start.epoch,
            start.num_ranks,
            self._num_ranks,
        )
        return 0

    def _one_pass(self, epoch: int, *, first: int) -> Iterator[tuple[int, list[Row]]]:
        """Yields steps and their rows, from the given step on; reads no window before it."""
        by_rank = self._windows(epoch)
        num_steps = min(sum(map(self._num_batches, windows)) for windows in by_rank)
        begin = 0
        for number, window in enumerate(by_rank[self._rank]):
            end = begin + self._num_batches(window)
            steps = range(max(begin, first), min(end, num_steps))
            if steps:
                rng = random.Random(f"{self._seed}/{epoch}/{number}")
                planned = _planned(self._read(window), self._rows_each, rng)
                for step in steps:
                    yield step, planned[step - begin]
            begin = end

    def _windows(self, epoch: int) -> list[list[list[ShardRows]]]:
        """Returns the windows of each rank: its part of the shuffled shards, grouped to fit into
        memory."""
        order = [shard for shard, num_rows in enumerate(self._num_rows) if num_rows]
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        counts = [(shard, self._num_rows[shard]) for shard in order]
        return [
            self._grouped(rank_rows) for rank_rows in divided(counts, num_ranks=self._num_ranks)
        ]

    def _grouped(self, rank_rows: Sequence[ShardRows]) -> list[list[ShardRows]]:
        windows: list[list[ShardRows]] = []
        room = 0
        for shard_rows in rank_rows:
            size = self._store.manifest.shards[shard_rows.shard].num_bytes
            if not windows or size > room:
                windows.append([])
                room = self._window_bytes
            windows[-1].append(shard_rows)
            room -= size
        return windows

    def _num_batches(self, window: Sequence[ShardRows]) -> int:
        return max(sum(len(shard_rows.rows) for shard_rows in window) // self._rows_each, 1)

    def _counted(self) -> list[int]:
        """Returns the number of rows of each shard; reads no features."""
        rows = [-(-len(tokens_T) // self._length) for tokens_T, _ in self._store.texts()]
        return [sum(rows[n] for n in numbers if n in self._only) for numbers in self._numbers]

    def _read(self, window: Sequence[ShardRows]) -> list[Row]:
        """Returns the rows of a window; shards of the last window are not read again."""
        shards = {shard_rows.shard for shard_rows in window}
        cached = {s: rows for s, rows in self._rows_by_shard.items() if s in shards}
        self._rows_by_shard = cached
        for shard in shards - cached.keys():
            numbers = self._only.intersection(self._numbers[shard])
            rows = read_rows(self._store, numbers, self._exit_layer, length=self._length)
            cached[shard] = [row.on(self._device) for row in rows]
        return [cached[shard_rows.shard][at] for shard_rows in window for at in shard_rows.rows]


def read_rows(
    store: FeatureStore, only: Collection[int], exit_layer: int, *, length: int
) -> list[Row]:
    """Returns the rows of selected sequences, in the store's order."""
    return [
        row
        for sequence in store.sequences(only)
        for row in rows_of(sequence, exit_layer, length=length)
    ]


def rows_of(sequence: FeatureSequence, exit_layer: int, *, length: int) -> Iterator[Row]:
    for start in range(0, sequence.num_tokens, length):
        stop = min(start + length, sequence.num_tokens)
        yield Row(
            tokens_T=sequence.tokens_T[start:stop],
            hidden_TD=sequence.hidden[exit_layer][start:stop],
            top_ids_TK=sequence.top_ids_TK[start:stop],
            top_logits_TK=sequence.top_logits_TK[start:stop],
            lse_T=sequence.lse_T[start:stop],
            num_prompt=min(max(sequence.num_prompt - 1 - start, 0), stop - start),
        )


def _planned(rows: Sequence[Row], num_rows: int, rng: random.Random) -> list[list[Row]]:
    """Returns shuffled batches of `num_rows` rows; an incomplete batch is left out of this pass."""
    order = list(rows)
    rng.shuffle(order)
    while len(order) < num_rows:
        order += order[: num_rows - len(order)]
    batches = []
    pool_rows = num_rows * _POOL_BATCHES
    for first in range(0, len(order), pool_rows):
        pool = sorted(order[first : first + pool_rows], key=lambda row: row.length)
        batches += [pool[at : at + num_rows] for at in range(0, len(pool), num_rows)]
    whole = [batch for batch in batches if len(batch) == num_rows]
    rng.shuffle(whole)
    return whole


def _numbers(store: FeatureStore) -> list[range]:
    """Returns the numbers of the sequences in each shard."""
    ranges = []
    first = 0
    for entry in store.manifest.shards:
        ranges.append(range(first, first + entry.num_sequences))
        first += entry.num_sequences
    return ranges
