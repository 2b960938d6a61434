"""The GPU's kernels of noise and choice in Triton's interpreter: the bits of the CPU's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from eesd_dist.backends.cpu.kernels.best_two import best_two
from eesd_dist.backends.cuda.choice import best_two_of_ranks, best_two_on_gpu, gumbel_on_gpu
from eesd_dist.model.parallel import rank_range
from eesd_dist.sampling.noise import gumbel_by_steps, key_words, noise_key
from eesd_dist.sampling.row_filters import filter_of, filters_by_row
from eesd_dist.types import ChoiceParams


def test_the_noise_has_the_same_bits() -> None:
    keys = [noise_key(seed, 977 * seed) for seed in (0, 1, -1, 2**63 - 1, 20_261_126)]
    for ids_V in (torch.arange(5000), torch.arange(190_000, 193_001, dtype=torch.int32)):
        gpu_SV = gumbel_on_gpu(key_words(keys), ids_V)
        expected_SV = gumbel_by_steps(keys, ids_V)
        assert torch.equal(gpu_SV.view(torch.int32), expected_SV.view(torch.int32))


@pytest.mark.parametrize("num_columns", [2, 3, 1024, 1025, 5000])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_the_two_best_scores_are_the_same(num_columns: int, is_truncated: bool) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    logits_SV = 3 * torch.randn(6, num_columns + 7, generator=generator)[:, :num_columns]
    logits_SV[1] = logits_SV[1].round()  # equal scores: the first column wins
    logits_SV[2] = 0.0
    divisors = [0.0, 0.0, 0.0, 0.7, 1.3, 1e-3]
    words_S3 = key_words([noise_key(5, at) if divisors[at] else 0 for at in range(6)])
    vocab_ids = 3 * torch.arange(num_columns) + 11 if is_truncated else None
    ids_V = torch.arange(num_columns) if vocab_ids is None else vocab_ids
    columns_S2, values_S2 = best_two(
        logits_SV.contiguous().numpy(), divisors, words_S3, ids_V.to(torch.int32).numpy(), None
    )
    gpu_S4 = best_two_on_gpu(logits_SV, divisors, words_S3, vocab_ids).numpy()
    assert np.array_equal(gpu_S4[:, :2], ids_V.numpy()[columns_S2])
    assert np.array_equal(gpu_S4[:, 2:].view(np.float32), values_S2)


FILTERS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.0, "top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 1 - 1e-16},
    {"min_p": 0.05},
    {"top_k": 2, "temperature": 0.3},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 300, "top_p": 0.99, "min_p": 1e-4},
    {"top_k": 6000, "top_p": 0.7},
)


@pytest.mark.parametrize("num_columns", [2, 30, 1025, 3000])
@pytest.mark.parametrize("logits", ["random", "equal values", "all equal", "some impossible"])
def test_filters_leave_the_tokens_that_they_leave_on_a_cpu(num_columns: int, logits: str) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    logits_SV = 3 * torch.randn(len(FILTERS), num_columns + 5, generator=generator)[:, :num_columns]
    if logits == "equal values":
        logits_SV = logits_SV.round()
    elif logits == "all equal":
        logits_SV[:] = -0.5
    elif logits == "some impossible":
        logits_SV[:, ::2] = -torch.inf
    params = [ChoiceParams(**changes) for changes in FILTERS]
    divisors = [row_params.noise_temperature for row_params in params]
    words_S3 = key_words([noise_key(7, at) if divisors[at] else 0 for at in range(len(params))])
    ids_V = 3 * torch.arange(num_columns, dtype=torch.int32) + 11
    filters = filters_by_row([filter_of(row_params) for row_params in params])
    columns_S2, values_S2 = best_two(
        logits_SV.contiguous().numpy(), divisors, words_S3, ids_V.numpy(), filters
    )
    gpu_S4 = best_two_on_gpu(logits_SV, divisors, words_S3, ids_V, filters).numpy()
    scores_S2 = gpu_S4[:, 2:].view(np.float32)
    is_open_S = np.isnan(scores_S2[:, 0])
    assert is_open_S.sum() < (5 if logits == "all equal" else 2)  # narrow, far from the best scores
    at = np.flatnonzero(~is_open_S)
    assert np.array_equal(gpu_S4[at, 0], ids_V.numpy()[columns_S2[at, 0]])
    assert np.array_equal(scores_S2[at, 0], values_S2[at, 0])
    second = at[np.isfinite(scores_S2[at, 1])]
    assert np.array_equal(scores_S2[second, 1], values_S2[second, 1])
    assert len(second) > 3 or num_columns == 2


@pytest.mark.parametrize("num_columns", [1024, 1500, 2048])
def test_not_a_number_is_the_largest_score_as_on_a_cpu(num_columns: int) -> None:
    """A model that overflows must not choose a token outside the vocabulary."""
    logits_SV = torch.randn(3, num_columns)
    logits_SV[0] = torch.nan
    logits_SV[1, 700:] = torch.nan
    words_S3 = key_words([0, 0, 0])
    columns_S2, _ = best_two(
        logits_SV.numpy(),
        [0.0] * 3,
        words_S3,
        torch.arange(num_columns, dtype=torch.int32).numpy(),
        None,
    )
    gpu_S4 = best_two_on_gpu(logits_SV, [0.0] * 3, words_S3, None).numpy()
    assert np.array_equal(gpu_S4[:, 0], columns_S2[:, 0])
    assert gpu_S4[:, :2].max() < num_columns


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_two_best_scores_of_all_ranks_are_those_of_all_columns(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    logits_SV = 3 * torch.randn(40, 50, generator=generator)
    logits_SV[10:30] = logits_SV[10:30].round()  # equal scores, of one rank and of several
    logits_SV[30] = torch.nan
    divisors, words_S3 = [0.0] * 40, key_words([0] * 40)
    vocab_ids = 3 * torch.arange(50, dtype=torch.int32) + 11
    best = []
    for rank in range(num_ranks):
        columns = rank_range(50, rank, num_ranks)
        shard_SV = logits_SV[:, columns.start : columns.stop]
        ids_V = vocab_ids[columns.start : columns.stop]
        best.append(best_two_on_gpu(shard_SV, divisors, words_S3, ids_V))
    best_GS4 = torch.stack(best)
    expected_S4 = best_two_on_gpu(logits_SV, divisors, words_S3, vocab_ids)
    assert torch.equal(best_two_of_ranks(best_GS4, vocab_size=200), expected_S4)
    best_GS4[1:] = 2**31 - 1  # what is left of a lost rank
    tokens_S2 = best_two_of_ranks(best_GS4, vocab_size=200)[:, :2]
    assert 0 <= tokens_S2.min() <= tokens_S2.max() < 200
