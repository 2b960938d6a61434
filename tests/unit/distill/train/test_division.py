"""Ranks divide the shards: disjoint rows, together all of them, in equally many steps."""

import logging
import random
from collections import Counter
from itertools import chain, islice, takewhile
from pathlib import Path

import pytest

from eesd_dist.distill.features import FeatureSequence, FeatureStore
from eesd_dist.distill.train.batches import (
    BatchReader,
    BatchShape,
    PlannedBatch,
    Position,
    Row,
    read_rows,
)
from eesd_dist.distill.train.division import divided
from eesd_dist.distill.train.held_out_rows import held_out_batches
from eesd_dist.errors import ConfigError
from tests.support.tiny_features import EXIT_LAYER, write_tiny_features, write_tiny_target

LENGTH = 16
ROWS_EACH = 2
SIZES = (1, 20, 3, 9, 14, 1)
"""Sequences of the shards: uneven, as an interrupted collection or answers of a service are."""


class Opened(FeatureStore):
    """The real store; records which shards are read."""

    def __init__(self, store: FeatureStore) -> None:
        super().__init__(store.folder, store.manifest)
        self.shards: list[int] = []

    def shard(self, index: int) -> list[FeatureSequence]:
        self.shards.append(index)
        return super().shard(index)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("store")
    target = write_tiny_target(folder / "target")
    return write_tiny_features(folder / "features", target, shard_sizes=SIZES)


def reader(
    store: FeatureStore, rank: int, num_ranks: int, *, window_bytes: int = 2**30
) -> BatchReader:
    return BatchReader(
        store,
        exit_layer=EXIT_LAYER,
        only=range(store.num_sequences),
        shape=BatchShape(rows=ROWS_EACH * num_ranks, length=LENGTH),
        seed=3,
        window_bytes=window_bytes,
        rank=rank,
        num_ranks=num_ranks,
    )


def passes(
    batch_reader: BatchReader, num_passes: int, *, start: Position | None = None
) -> list[PlannedBatch]:
    return list(
        takewhile(
            lambda batch: batch.after.epoch < num_passes, batch_reader.batches(start or Position())
        )
    )


def text(row: Row) -> tuple[int, ...]:
    return tuple(row.tokens_T.tolist())


def texts(batches: list[PlannedBatch]) -> list[list[tuple[int, ...]]]:
    return [[text(row) for row in batch.rows] for batch in batches]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_a_pass_of_all_ranks_has_every_row_once_but_for_what_fills_no_batch(
    store: FeatureStore, num_ranks: int
) -> None:
    rows = read_rows(store, range(store.num_sequences), EXIT_LAYER, length=LENGTH)
    expected = Counter(map(text, rows))
    for epoch in range(3):
        counts: Counter[tuple[int, ...]] = Counter()
        for rank in range(num_ranks):
            batches = passes(reader(store, rank, num_ranks), epoch + 1, start=Position(epoch=epoch))
            assert all(len(batch.rows) == ROWS_EACH for batch in batches)
            assert len(batches) == len(rows) // num_ranks // ROWS_EACH
            counts.update(row for batch in texts(batches) for row in batch)
        assert counts <= expected
        left_out = expected.total() - counts.total()
        assert left_out < num_ranks * ROWS_EACH


@pytest.mark.parametrize("window_bytes", [1, 60_000, 2**30])
@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_take_equally_many_steps_with_windows_of_any_size(
    store: FeatureStore, num_ranks: int, window_bytes: int
) -> None:
    positions = [
        [batch.after for batch in passes(batch_reader, 3)]
        for batch_reader in (
            reader(store, rank, num_ranks, window_bytes=window_bytes) for rank in range(num_ranks)
        )
    ]
    assert all(rank_positions == positions[0] for rank_positions in positions)
    assert {position.epoch for position in positions[0]} == {0, 1, 2}


def test_one_rank_reads_whole_shards_in_the_shuffled_order(store: FeatureStore) -> None:
    """Windows of one shard, planned naively."""
    expected = []
    order = list(range(len(SIZES)))
    random.Random("3/0").shuffle(order)
    for window, shard in enumerate(order):
        first = sum(SIZES[:shard])
        numbers = range(first, first + SIZES[shard])
        rows = read_rows(store, numbers, EXIT_LAYER, length=LENGTH)
        rng = random.Random(f"3/0/{window}")
        rng.shuffle(rows)
        if len(rows) == 1:
            rows *= ROWS_EACH
        pools = [rows[at : at + 16 * ROWS_EACH] for at in range(0, len(rows), 16 * ROWS_EACH)]
        ordered = [row for pool in pools for row in sorted(pool, key=lambda row: row.length)]
        batches = [
            [text(row) for row in ordered[at : at + ROWS_EACH]]
            for at in range(0, len(ordered) - ROWS_EACH + 1, ROWS_EACH)
        ]
        rng.shuffle(batches)
        expected += batches
    assert texts(passes(reader(store, 0, 1, window_bytes=1), 1)) == expected


def opened_in_one_pass(
    store: FeatureStore, rank: int, num_ranks: int, *, skip: int = 0, window_bytes: int = 2**30
) -> list[int]:
    """Returns the shards that a rank reads in its first pass, from the step `skip` on."""
    batches = passes(reader(store, rank, num_ranks, window_bytes=window_bytes), 1)
    start = batches[skip - 1].after if skip else Position()
    seen = Opened(store)
    resumed = reader(seen, rank, num_ranks, window_bytes=window_bytes).batches(start)
    assert len(list(islice(resumed, len(batches) - skip))) == len(batches) - skip
    return seen.shards


def test_a_rank_reads_the_shards_of_its_part_alone_and_each_once(store: FeatureStore) -> None:
    num_ranks = 3
    opened = [opened_in_one_pass(store, rank, num_ranks) for rank in range(num_ranks)]
    for shards in opened:
        assert len(shards) == len(set(shards)) < len(SIZES)
    across_a_border = sum(map(len, opened)) - len(set().union(*opened))
    assert across_a_border <= num_ranks - 1


def test_even_shards_are_read_by_one_rank_each() -> None:
    divisions = divided([(4, 10), (0, 10), (3, 10), (1, 10)], num_ranks=2)
    assert [[shard_rows.shard for shard_rows in division] for division in divisions] == [
        [4, 0],
        [3, 1],
    ]
    assert all(shard_rows.rows == range(10) for division in divisions for shard_rows in division)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 10])
def test_parts_are_equal_and_disjoint(num_ranks: int) -> None:
    shards = [(2, 7), (0, 1), (1, 25), (3, 4)]
    divisions = divided(shards, num_ranks=num_ranks)
    rows_by_rank = [
        [(shard_rows.shard, row) for shard_rows in division for row in shard_rows.rows]
        for division in divisions
    ]
    assert {len(rows) for rows in rows_by_rank} == {37 // num_ranks}
    in_order = [(shard, row) for shard, count in shards for row in range(count)]
    assert list(chain(*rows_by_rank)) == in_order[: 37 // num_ranks * num_ranks]


@pytest.mark.parametrize("window_bytes", [1, 2**30])
def test_each_rank_goes_on_at_the_position_of_another_one(
    store: FeatureStore, window_bytes: int
) -> None:
    first, second = (
        passes(reader(store, rank, 2, window_bytes=window_bytes), 2) for rank in (0, 1)
    )
    for at in range(0, len(first), 3):
        resumed = reader(store, 1, 2, window_bytes=window_bytes)
        follow = passes(resumed, 2, start=first[at].after)
        assert texts(follow) == texts(second[at + 1 :])


def test_going_on_reads_no_shard_of_a_window_that_is_done(store: FeatureStore) -> None:
    whole = opened_in_one_pass(store, 0, 2, window_bytes=1)
    num_steps = len(passes(reader(store, 0, 2, window_bytes=1), 1))
    reopened = opened_in_one_pass(store, 0, 2, window_bytes=1, skip=num_steps - 1)
    assert len(whole) > 1
    assert reopened == whole[-1:]


def test_another_number_of_ranks_begins_the_pass_again_and_says_so(
    store: FeatureStore, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = next(
        batch.after for batch in passes(reader(store, 0, 2), 2) if batch.after.epoch == 1
    )
    with caplog.at_level(logging.WARNING):
        batches = passes(reader(store, 1, 3), 2, start=stopped)
    assert texts(batches) == texts(passes(reader(store, 1, 3), 2, start=Position(epoch=1)))
    assert "step 1 of pass 1 with 2 workers and goes on with 3" in caplog.text


def test_fewer_rows_than_ranks_are_refused(tmp_path: Path, store: FeatureStore) -> None:
    target = write_tiny_target(tmp_path / "target")
    tiny = write_tiny_features(tmp_path / "features", target, shard_sizes=(1,))
    with pytest.raises(ConfigError, match="cannot be divided among 40 workers: use fewer"):
        reader(tiny, 0, 40)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 12])
def test_held_out_rows_are_evaluated_once_by_one_rank(store: FeatureStore, num_ranks: int) -> None:
    only = [0, 2, 5, 21, 22, 40, 41]
    rows = read_rows(store, only, EXIT_LAYER, length=LENGTH)
    ranks = [
        held_out_batches(
            store,
            only,
            EXIT_LAYER,
            shape=BatchShape(rows=4, length=LENGTH),
            rank=rank,
            num_ranks=num_ranks,
        )
        for rank in range(num_ranks)
    ]
    judged = [
        text(row) for batches in ranks for batch in batches if batch.counts for row in batch.rows
    ]
    assert Counter(judged) == Counter(map(text, rows))
    assert {len(batches) for batches in ranks} == {-(-len(rows) // 4)}
    assert all(batch.rows for batches in ranks for batch in batches)
    lengths = [row.length for batch in ranks[0] for row in batch.rows if batch.counts]
    assert lengths == sorted(lengths)
