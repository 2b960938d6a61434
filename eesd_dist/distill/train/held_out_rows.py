"""The held-out rows that one rank evaluates."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from eesd_dist.distill.features import FeatureStore
from eesd_dist.distill.train.batches import BatchShape, Row, rows_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOutBatch:
    """A rank's rows of a batch."""

    rows: list[Row]
    counts: bool
    """False where this rank has no row: `rows` is then one of another rank, and its figures are not
    added. ZeRO-3 gathers in every forward pass: all ranks need the same number of passes."""


class _RowName(NamedTuple):
    length: int
    sequence: int
    number: int


def held_out_batches(
    store: FeatureStore,
    only: Collection[int],
    exit_layer: int,
    *,
    shape: BatchShape,
    rank: int,
    num_ranks: int,
) -> list[HeldOutBatch]:
    """Returns this rank's part of all rows of selected sequences, sorted by length. Features of
    other ranks' sequences are not kept in memory."""
    names = _row_names(store, only, length=shape.length)
    batches = [names[at : at + shape.rows] for at in range(0, len(names), shape.rows)]
    shares = [batch[rank::num_ranks] for batch in batches]
    own = [share or batch[:1] for share, batch in zip(shares, batches, strict=True)]
    rows = _read(store, {name for share in own for name in share}, exit_layer, length=shape.length)
    return [
        HeldOutBatch(rows=[rows[name] for name in names], counts=bool(share))
        for names, share in zip(own, shares, strict=True)
    ]


def _row_names(store: FeatureStore, only: Collection[int], *, length: int) -> list[_RowName]:
    """Returns the rows of these sequences, shorter ones first."""
    selected = frozenset(only)
    return sorted(
        _RowName(min(length, len(tokens_T) - start), sequence, start // length)
        for sequence, (tokens_T, _) in enumerate(store.texts())
        if sequence in selected
        for start in range(0, len(tokens_T), length)
    )


def _read(
    store: FeatureStore, names: set[_RowName], exit_layer: int, *, length: int
) -> dict[_RowName, Row]:
    numbers = sorted({name.sequence for name in names})
    rows = {}
    for number, sequence in zip(numbers, store.sequences(numbers), strict=True):
        for at, row in enumerate(rows_of(sequence, exit_layer, length=length)):
            name = _RowName(row.length, number, at)
            if name in names:
                rows[name] = row.copied()
    return rows
