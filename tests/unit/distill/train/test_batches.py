"""Batches from a store in one process: every row once per pass, resumable."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from eesd_dist.distill.features import FeatureStore
from eesd_dist.distill.train.batches import (
    Batch,
    BatchReader,
    BatchShape,
    PlannedBatch,
    Position,
    Row,
    read_rows,
)
from eesd_dist.errors import ConfigError
from tests.support.tiny_features import (
    EXIT_LAYER,
    NUM_PROMPT,
    write_tiny_features,
    write_tiny_target,
)

LENGTH = 16
ROWS = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("store")
    return write_tiny_features(folder / "features", write_tiny_target(folder / "target"))


def reader(
    store: FeatureStore, *, only: Sequence[int] | None = None, window_bytes: int = 2**30
) -> BatchReader:
    return BatchReader(
        store,
        exit_layer=EXIT_LAYER,
        only=range(store.num_sequences) if only is None else only,
        shape=BatchShape(rows=ROWS, length=LENGTH),
        seed=3,
        window_bytes=window_bytes,
    )


def texts(batches: Sequence[PlannedBatch]) -> list[list[tuple[int, ...]]]:
    return [[tuple(row.tokens_T.tolist()) for row in batch.rows] for batch in batches]


def test_a_pass_holds_every_row_once_but_for_what_fills_no_batch(store: FeatureStore) -> None:
    rows = read_rows(store, range(store.num_sequences), EXIT_LAYER, length=LENGTH)
    expected = Counter(tuple(row.tokens_T.tolist()) for row in rows)
    first_pass = []
    for batch in reader(store).batches(Position()):
        if batch.after.epoch > 0:
            break
        first_pass.append(batch)
    counts = Counter(text for batch in texts(first_pass) for text in batch)
    assert counts <= expected
    assert counts.total() == len(rows) // ROWS * ROWS


def test_two_passes_come_in_different_orders(store: FeatureStore) -> None:
    num_batches = sum(
        1 for _ in islice(reader(store).batches(Position()), 40) if _.after.epoch == 0
    )
    both = texts(list(islice(reader(store).batches(Position()), 2 * num_batches)))
    assert both[:num_batches] != both[num_batches:]


@pytest.mark.parametrize("window_bytes", [1, 2**30])
def test_from_any_position_the_same_batches_follow(store: FeatureStore, window_bytes: int) -> None:
    batches = list(islice(reader(store, window_bytes=window_bytes).batches(Position()), 25))
    for at in (0, 3, 6, 13, 20):
        resumed = reader(store, window_bytes=window_bytes).batches(batches[at].after)
        follow = list(islice(resumed, 25 - at - 1))
        assert texts(follow) == texts(batches[at + 1 :])


def test_only_the_wanted_sequences_are_read(store: FeatureStore) -> None:
    numbers = [1, 5, 20, 21, 40]
    rows = read_rows(store, numbers, EXIT_LAYER, length=LENGTH)
    allowed = {tuple(row.tokens_T.tolist()) for row in rows}
    for batch in texts(list(islice(reader(store, only=numbers).batches(Position()), 6))):
        assert set(batch) <= allowed


def test_the_micro_batches_are_the_batch_and_weigh_as_much(store: FeatureStore) -> None:
    batch = next(reader(store).batches(Position()))
    shares = [batch.share(micro, 4) for micro in range(4)]
    assert [len(share) for share in shares] == [2, 2, 2, 2]
    assert {id(row) for share in shares for row in share} == {id(row) for row in batch.rows}
    cpu = torch.device("cpu")
    weights = [Batch.of(share, prompt_weight=0.3, device=cpu).weights_BT.sum() for share in shares]
    assert float(sum(weights)) == pytest.approx(batch.weight(0.3), rel=1e-6)


def test_rows_keep_hidden_states_and_targets_of_their_stretch(store: FeatureStore) -> None:
    sequence = next(s for s in store.sequences() if s.num_tokens > LENGTH)
    number = next(i for i, s in enumerate(store.sequences()) if s.num_tokens > LENGTH)
    head, tail = read_rows(store, [number], EXIT_LAYER, length=LENGTH)
    assert head.length == LENGTH
    assert head.num_prompt == NUM_PROMPT - 1  # the last prompt position predicts an answer token
    assert tail.num_prompt == 0
    assert torch.equal(torch.cat([head.tokens_T, tail.tokens_T]), sequence.tokens_T)
    assert torch.equal(torch.cat([head.hidden_TD, tail.hidden_TD]), sequence.hidden[EXIT_LAYER])
    assert torch.equal(torch.cat([head.lse_T, tail.lse_T]), sequence.lse_T)


def test_padding_weighs_nothing_and_changes_nothing(store: FeatureStore) -> None:
    rows = read_rows(store, [0, 1, 2], EXIT_LAYER, length=LENGTH)
    rows = sorted(rows, key=lambda row: row.length)
    batch = Batch.of(rows, prompt_weight=0.5, device=torch.device("cpu"))
    longest = rows[-1].length
    for at, row in enumerate(rows):
        expected = [0.5] * row.num_prompt + [1.0] * (row.length - row.num_prompt)
        expected += [0.0] * (longest - row.length)
        assert batch.weights_BT[at].tolist() == expected
        assert torch.equal(batch.hidden_BTD[at, : row.length], row.hidden_TD)
        ids = batch.targets.ids_NK.view(len(rows), longest, -1)[at, : row.length]
        assert torch.equal(ids, row.top_ids_TK.long())


def test_a_store_with_too_few_rows_fills_its_batch_by_repeating(store: FeatureStore) -> None:
    batch: Sequence[Row] = next(reader(store, only=[4]).batches(Position())).rows
    assert len(batch) == ROWS
    assert len({tuple(row.tokens_T.tolist()) for row in batch}) <= 2


def test_rows_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        BatchShape(rows=6, length=16, num_shares=4)
    with pytest.raises(ConfigError, match="1 or more"):
        BatchShape(rows=0, length=16)
