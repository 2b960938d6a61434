"""Ranks that each have a part of the vocabulary return the features that one rank computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from eesd_dist.engine.recording.row_features import feature_rows, features_of
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import RoundHeader, RowFeatures, Segment, TensorGroup
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.types import ChoiceParams
from tests.support.drafters import save_target
from tests.support.thread_ranks import on_ranks


def segment(num_rows: int, *, wants_features: bool) -> Segment:
    return Segment(
        start=0,
        num_rows=num_rows,
        num_sampled=0,
        pages=(0,),
        tokens=tuple(range(num_rows)),
        history=(),
        num_prompt=num_rows,
        params=ChoiceParams(temperature=0.0),
        wants_features=wants_features,
    )


SEGMENTS = (
    segment(3, wants_features=True),
    segment(2, wants_features=False),
    segment(4, wants_features=True),
)


def test_rows_of_segments_that_want_none_are_left_out() -> None:
    assert feature_rows(SEGMENTS) == [0, 1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("top_k", [1, 5, 60, 97])
def test_ranks_agree_with_one_rank_on_every_best_token(
    tmp_path: Path, num_ranks: int, top_k: int
) -> None:
    """With an uneven vocabulary, and more best tokens than a rank has tokens."""
    target = save_target(tmp_path, vocab_size=97)
    spec = ModelSpec.from_folder(target)
    header = RoundHeader(epoch=1, round_id=1, segments=SEGMENTS, exits=(3,), top_k=top_k)
    generator = torch.Generator().manual_seed(0)
    last_TD = torch.randn(9, spec.hidden_size, generator=generator)
    exit_TD = {3: torch.randn(9, spec.hidden_size, generator=generator)}

    def on(group: TensorGroup) -> RowFeatures:
        span = LlamaSpan.load(
            target,
            spec,
            3,
            4,
            group=group,
            dtype="float32",
            numerics="fast",
            device=torch.device("cpu"),
            num_pages=1,
            page_size=16,
        )
        return features_of(header, last_TD, exit_TD=exit_TD, span=span, group=group)

    single = on(SingleGroup())
    assert single.top_ids.shape == (7, top_k)
    assert np.array_equal(single.hidden[0], exit_TD[3][feature_rows(SEGMENTS)].numpy())
    for sharded in on_ranks(num_ranks, on):
        assert np.array_equal(sharded.top_ids, single.top_ids)
        assert np.array_equal(sharded.hidden[0], single.hidden[0])
        np.testing.assert_allclose(sharded.top_logits, single.top_logits, atol=1e-5)
        np.testing.assert_allclose(sharded.lse, single.lse, atol=1e-5)
