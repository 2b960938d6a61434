"""Plans batches of rows of text, and the share of each rank.

A pass over a store reads windows of as many shards as fit into memory; shards and rows are shuffled
by (seed, epoch, window). Texts longer than a row are split into rows; rows of similar length are
batched together to limit padding, and no row has two texts. The position is three numbers, which
are stored in a checkpoint: the same batches follow them.

Every rank plans the same batches and takes its share of the rows, so that two ranks with half a
batch each compute the same as one rank with a whole one. Does not depend on model, loss or
optimizer.
"""

# Shapes: B rows, T positions of the longest row, D hidden size, K best tokens of the target.

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eesd_dist.distill.features import FeatureSequence, FeatureStore
from eesd_dist.distill.train.losses import KeptTargets
from eesd_dist.errors import ConfigError

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
    window: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A contiguous part of one text. Position t is about the token after it."""

    tokens_T: Tensor
    hidden_TD: Tensor
    top_ids_TK: Tensor
    top_logits_TK: Tensor
    lse_T: Tensor
    num_given: int
    """Number of positions about a token of the prompt, which is never drafted."""

    @property
    def length(self) -> int:
        return int(self.tokens_T.shape[0])

    def weight(self, prompt_weight: float) -> float:
        return prompt_weight * self.num_given + (self.length - self.num_given)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows as one tensor, the shorter ones padded with weight 0."""

    tokens_BT: Tensor
    hidden_BTD: Tensor
    kept: KeptTargets
    """The target's distributions at B x T positions."""
    weights_BT: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], *, prompt_weight: float, device: torch.device) -> "Batch":
        weights = []
        for row in rows:
            weight_T = torch.ones(row.length)
            weight_T[: row.num_given] = prompt_weight
            weights.append(weight_T)

        def padded(parts: list[Tensor]) -> Tensor:
            return pad_sequence(parts, batch_first=True).to(device)

        return cls(
            tokens_BT=padded([row.tokens_T for row in rows]),
            hidden_BTD=padded([row.hidden_TD for row in rows]),
            kept=KeptTargets(
                ids_NK=padded([row.top_ids_TK for row in rows]).flatten(0, 1).long(),
                logits_NK=padded([row.top_logits_TK for row in rows]).flatten(0, 1),
                lse_N=padded([row.lse_T for row in rows]).flatten(),
            ),
            weights_BT=padded(weights),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBatch:
    """All rows of one step, and how they are split into shares."""

    rows: Sequence[Row]
    after: Position
    """Position from which to resume after this batch."""

    def share(self, index: int, num_shares: int) -> Sequence[Row]:
        return self.rows[index::num_shares]

    def weight(self, prompt_weight: float) -> float:
        """Returns the weight of the whole batch, over all ranks."""
        return sum(row.weight(prompt_weight) for row in self.rows)


class BatchReader:
    """Reads an endless sequence of batches from selected sequences of a store."""

    def __init__(
        self,
        store: FeatureStore,
        *,
        exit_layer: int,
        only: Collection[int],
        shape: BatchShape,
        seed: int,
        window_bytes: int,
    ) -> None:
        if not only:
            raise ConfigError(f"{store.folder}: no sequence is left to train on")
        self._store = store
        self._exit_layer = exit_layer
        self._only = frozenset(only)
        self._shape = shape
        self._seed = seed
        self._window_bytes = window_bytes
        self._rows_by_shard: dict[int, list[Row]] = {}
        """Rows of the last window, by shard."""

    def batches(self, start: Position) -> Iterator[PlannedBatch]:
        position = start
        while True:
            windows = self._windows(position.epoch)
            for window in range(position.window, len(windows)):
                rng = random.Random(f"{self._seed}/{position.epoch}/{window}")
                planned = _planned(self._read(windows[window]), self._shape.rows, rng)
                for batch in range(position.batch, len(planned)):
                    after = Position(epoch=position.epoch, window=window, batch=batch + 1)
                    yield PlannedBatch(rows=planned[batch], after=after)
                position = Position(epoch=position.epoch, window=window + 1)
            position = Position(epoch=position.epoch + 1)

    def _windows(self, epoch: int) -> list[list[int]]:
        """Returns shards with selected sequences, shuffled and grouped to fit into memory."""
        order = [i for i, numbers in enumerate(_numbers(self._store)) if self._wants(numbers)]
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        windows: list[list[int]] = []
        room = 0
        for shard in order:
            size = self._store.manifest.shards[shard].num_bytes
            if not windows or size > room:
                windows.append([])
                room = self._window_bytes
            windows[-1].append(shard)
            room -= size
        return windows

    def _wants(self, numbers: range) -> bool:
        return not self._only.isdisjoint(numbers)

    def _read(self, shards: Sequence[int]) -> list[Row]:
        """Returns the rows of a window; shards of the last window are not read again."""
        kept = {s: rows for s, rows in self._rows_by_shard.items() if s in shards}
        self._rows_by_shard = kept
        all_numbers = _numbers(self._store)
        for shard in shards:
            if shard in kept:
                continue
            wanted = self._only.intersection(all_numbers[shard])
            kept[shard] = read_rows(
                self._store, wanted, self._exit_layer, length=self._shape.length
            )
        return [row for shard in shards for row in kept[shard]]


def read_rows(
    store: FeatureStore, only: Collection[int], exit_layer: int, *, length: int
) -> list[Row]:
    """Returns the rows of selected sequences, in the store's order."""
    return [
        row
        for sequence in store.sequences(only)
        for row in _rows_of(sequence, exit_layer, length=length)
    ]


def in_order(rows: Sequence[Row], num_rows: int) -> list[Sequence[Row]]:
    """Returns batches of all rows, sorted by length; for evaluation, not for training."""
    ordered = sorted(rows, key=lambda row: row.length)
    return [ordered[at : at + num_rows] for at in range(0, len(ordered), num_rows)]


def _rows_of(sequence: FeatureSequence, exit_layer: int, *, length: int) -> Iterator[Row]:
    for start in range(0, sequence.num_tokens, length):
        stop = min(start + length, sequence.num_tokens)
        yield Row(
            tokens_T=sequence.tokens_T[start:stop],
            hidden_TD=sequence.hidden[exit_layer][start:stop],
            top_ids_TK=sequence.top_ids_TK[start:stop],
            top_logits_TK=sequence.top_logits_TK[start:stop],
            lse_T=sequence.lse_T[start:stop],
            num_given=min(max(sequence.num_prompt - 1 - start, 0), stop - start),
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
    found = []
    first = 0
    for entry in store.manifest.shards:
        found.append(range(first, first + entry.num_sequences))
        first += entry.num_sequences
    return found
