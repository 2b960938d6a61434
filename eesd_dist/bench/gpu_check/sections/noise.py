"""Checks noise, filters and masks on the device against the CPU.

All are computed with integer and single IEEE operations, so that noise has the same bits and
filters and masks keep the same tokens on every device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.sampling.noise import Stream, gumbel, noise_key
from eesd_dist.sampling.processors import VocabularyShard, processed
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.types import SamplingParams

_CPU = torch.device("cpu")


# Shapes: S rows, V tokens.
def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    vocab = 20_000 if setting.is_small else 200_000
    _noise(device, vocab, 8 if setting.is_small else 64, rows)
    _filters(device, vocab, 6 if setting.is_small else 32, rows)


def _noise(device: torch.device, vocab: int, num_keys: int, rows: Rows) -> None:
    seeds = (0, 1, -1, 2**63 - 1, 2**64 - 1, 20_261_122)
    keys = [
        noise_key(seeds[at % len(seeds)], 977 * at, list(Stream)[at % len(Stream)])
        for at in range(num_keys)
    ]
    ids_V = torch.arange(vocab, dtype=torch.int32)
    expected_SV = gumbel(keys, ids_V)
    for name, ids in (("int32", ids_V), ("int64", ids_V.long())):
        found_SV = gumbel(keys, ids.to(device)).cpu()
        different = int((found_SV.view(torch.int32) != expected_SV.view(torch.int32)).sum())
        rows.prove(
            f"gumbel, {name} ids below {vocab}",
            different == 0,
            value=float(different),
            unit="differ",
            detail=f"{expected_SV.numel()} draws, {num_keys} keys",
        )
    shard_V = torch.arange(vocab // 3, 2 * vocab // 3, dtype=torch.int32, device=device)
    alone = torch.cat([gumbel([key], shard_V) for key in keys]).cpu()
    equal = torch.equal(alone, expected_SV[:, vocab // 3 : 2 * vocab // 3])
    rows.prove("gumbel, a shard and single rows", equal, detail="as the whole, on the device")


def _filters(device: torch.device, vocab: int, num_rows: int, rows: Rows) -> None:
    generator = torch.Generator().manual_seed(7)
    logits_SV = torch.randn(num_rows, vocab, generator=generator).mul_(4.0)
    logits_SV[:, : vocab // 4] = logits_SV[:, : vocab // 4].round()  # many equal scores
    for name, params in (
        ("top_k", SamplingParams(temperature=0.7, top_k=50)),
        ("min_p", SamplingParams(temperature=0.7, min_p=0.02)),
        ("top_p", SamplingParams(temperature=0.7, top_p=0.9)),
        ("top_p in top_k", SamplingParams(temperature=1.3, top_p=0.8, top_k=400)),
    ):
        rules = [RowRule.of(params, position=at, num_prompt=1) for at in range(num_rows)]
        on_device_SV = logits_SV.to(device)
        kept_SV = _kept(on_device_SV, rules)
        _same_on_the_device(name, on_device_SV, rules, kept_SV, rows)
        _same_as_the_cpu(name, logits_SV, rules, kept_SV.cpu(), rows)
    for name, params in (
        ("masks", SamplingParams(temperature=0.7)),
        ("top_p in masks", SamplingParams(temperature=0.7, top_p=0.9)),
    ):
        masks_SV = torch.rand(num_rows, vocab, generator=generator) < 0.5
        packed = np.packbits(masks_SV.numpy(), axis=-1, bitorder="little")
        rules = [
            RowRule.of(params, position=at, num_prompt=1, mask=packed[at].tobytes())
            for at in range(num_rows)
        ]
        kept_SV = _kept(logits_SV.to(device), rules).cpu()
        _same_as_the_cpu(name, logits_SV, rules, kept_SV, rows)
        rows.prove(f"{name}: inside", bool((masks_SV | ~kept_SV).all()), detail="a subset")


def _kept(logits_SV: Tensor, rules: Sequence[RowRule]) -> Tensor:
    columns = VocabularyShard(start=0, size=logits_SV.shape[-1])
    return processed(logits_SV, rules, columns) > -torch.inf


def _same_on_the_device(
    name: str, logits_SV: Tensor, rules: Sequence[RowRule], kept_SV: Tensor, rows: Rows
) -> None:
    """Compares the rows with the same rows again, alone, and in another order."""
    num_rows = len(rules)
    different = sum(not torch.equal(_kept(logits_SV, rules), kept_SV) for _ in range(5))
    different += sum(
        not torch.equal(_kept(logits_SV[at : at + 1], rules[:1])[0], kept_SV[at])
        for at in range(num_rows)
    )
    reversed_SV = _kept(logits_SV.flip(0), rules).flip(0)
    different += not torch.equal(reversed_SV, kept_SV)
    rows.prove(
        f"{name}: again, alone, in another batch",
        different == 0,
        value=float(different),
        unit="differ",
        detail=f"{num_rows} rows of {logits_SV.shape[1]} tokens on the device",
    )


def _same_as_the_cpu(
    name: str, logits_SV: Tensor, rules: Sequence[RowRule], kept_SV: Tensor, rows: Rows
) -> None:
    expected_SV = _kept(logits_SV, rules)
    other_SV = expected_SV != kept_SV
    num_rows = int(other_SV.any(dim=-1).sum())
    rows.prove(
        f"{name}: as on the CPU",
        num_rows == 0,
        value=float(num_rows),
        unit="rows differ",
        detail=f"by {int(other_SV.sum())} tokens",
    )
