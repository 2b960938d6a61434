"""Noise, filters and masks on the device against the CPU.

All are computed with integer and single IEEE operations, so that noise has the same bits and
filters and masks keep the same tokens on every device.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from eesd_dist.sampling.elementary import mass_of, neg_log
from eesd_dist.sampling.noise import Stream, gumbel, noise_key
from eesd_dist.sampling.processors import VocabularyShard, processed
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import choose, draft_choice, perturbed
from eesd_dist.types import SamplingParams

pytestmark = pytest.mark.gpu

_SEEDS = (0, 1, -1, 2**63 - 1, 2**64 - 1, 20_261_122)


# Shapes: S rows, V tokens.
@pytest.fixture(scope="module")
def vocab(is_small: bool) -> int:
    return 20_000 if is_small else 200_000


@pytest.fixture(scope="module")
def logits(vocab: int, is_small: bool) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    logits_SV = torch.randn(6 if is_small else 32, vocab, generator=generator).mul_(4.0)
    logits_SV[:, : vocab // 4] = logits_SV[:, : vocab // 4].round()  # many equal scores
    return logits_SV


def test_noise_has_the_bits_of_the_cpu(vocab: int, device: torch.device, is_small: bool) -> None:
    keys = [
        noise_key(_SEEDS[at % len(_SEEDS)], 977 * at, list(Stream)[at % len(Stream)])
        for at in range(8 if is_small else 64)
    ]
    ids_V = torch.arange(vocab, dtype=torch.int32)
    expected_SV = gumbel(keys, ids_V)
    for dtype in (torch.int32, torch.int64):
        noise_SV = gumbel(keys, ids_V.to(device, dtype)).cpu()
        num_different = (noise_SV.view(torch.int32) != expected_SV.view(torch.int32)).sum()
        assert num_different == 0, dtype
    shard = slice(vocab // 3, 2 * vocab // 3)
    rows = [gumbel([key], ids_V[shard].to(device)).cpu() for key in keys]
    assert torch.equal(torch.cat(rows), expected_SV[:, shard]), "a shard and single rows"


def test_elementary_functions_have_the_bits_of_the_cpu(device: torch.device) -> None:
    x = torch.linspace(0.0, 60.0, 300_001)
    assert torch.equal(mass_of(-x.to(device)).cpu(), mass_of(-x))
    assert torch.equal(neg_log(x.to(device).add(0.1)).cpu(), neg_log(x.add(0.1)))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=0.7, min_p=0.02),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.3, top_p=0.8, top_k=400),
    ],
    ids=["top_k", "min_p", "top_p", "top_p in top_k"],
)
def test_filters_keep_the_tokens_of_the_cpu_in_any_batch(
    params: SamplingParams, logits: Tensor, device: torch.device
) -> None:
    num_rows = len(logits)
    rules = [RowRule.of(params, position=at, num_prompt=1) for at in range(num_rows)]
    on_device_SV = logits.to(device)
    survivors_SV = _survivors(on_device_SV, rules)
    assert torch.equal(survivors_SV.cpu(), _survivors(logits, rules)), "on the CPU"
    for _ in range(5):
        assert torch.equal(_survivors(on_device_SV, rules), survivors_SV), "another run"
    for at in range(num_rows):
        row_SV = _survivors(on_device_SV[at : at + 1], rules[:1])
        assert torch.equal(row_SV[0], survivors_SV[at]), "a single row"
    assert torch.equal(_survivors(on_device_SV.flip(0), rules).flip(0), survivors_SV), "reversed"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, seed=5, top_p=0.9),
        SamplingParams(temperature=0.7, seed=5, top_k=20, top_p=0.8, min_p=0.001),
        SamplingParams(temperature=1.3, seed=5, top_k=1),
        SamplingParams(temperature=0.7, seed=5, top_k=400, repetition_penalty=1.2),
    ],
    ids=["top_p", "all three", "one token", "top_k and a penalty"],
)
def test_choices_among_filtered_tokens_are_those_of_the_cpu(
    params: SamplingParams, logits: Tensor, device: torch.device
) -> None:
    """Kernels decide most rows, and torch those of which no candidate is kept."""
    rules = [
        RowRule.of(params, position=at, num_prompt=1, history=range(200))
        for at in range(len(logits))
    ]
    scores_SV = perturbed(logits, rules, VocabularyShard(start=0, size=logits.shape[-1]))
    expected = scores_SV.argmax(dim=-1).tolist()
    assert choose(logits.to(device), rules).tokens.tolist() == expected
    assert draft_choice(logits.to(device), rules).tokens[:, 0].tolist() == expected


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_masks_keep_the_tokens_of_the_cpu(
    top_p: float, logits: Tensor, device: torch.device
) -> None:
    masks_SV = torch.rand(logits.shape, generator=torch.Generator().manual_seed(8)) < 0.5
    packed = np.packbits(masks_SV.numpy(), axis=-1, bitorder="little")
    params = SamplingParams(temperature=0.7, top_p=top_p)
    rules = [
        RowRule.of(params, position=at, num_prompt=1, mask=row.tobytes())
        for at, row in enumerate(packed)
    ]
    survivors_SV = _survivors(logits.to(device), rules).cpu()
    assert torch.equal(survivors_SV, _survivors(logits, rules))
    assert bool((masks_SV | ~survivors_SV).all())


def _survivors(logits_SV: Tensor, rules: Sequence[RowRule]) -> Tensor:
    columns = VocabularyShard(start=0, size=logits_SV.shape[-1])
    return processed(logits_SV, rules, columns) > -torch.inf
