"""The work of each rank that holds a part of a vocabulary; cheap to import in a peer."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eesd_dist.model.parallel import joined_over_ranks, rank_range
from eesd_dist.sampling.filters import filtered
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import choose
from eesd_dist.transport.authentication.handshake import Address
from eesd_dist.types import SamplingParams
from tests.dist.transport.peers import join_verify_stage

NUM_COLUMNS = 5_000
TIMEOUT_S = 20.0

MENU = [
    SamplingParams(seed=1, top_p=0.95),
    SamplingParams(seed=2, top_p=0.5, temperature=1.5),
    SamplingParams(seed=3, top_k=50, top_p=0.9),
    SamplingParams(seed=4, top_k=700, top_p=0.9, min_p=0.001),
    SamplingParams(seed=5, min_p=0.05, logit_bias=((17, 3.0), (4_000, -100.0))),
    SamplingParams(temperature=0.0, top_p=0.1),
]


def rules() -> list[RowRule]:
    """Returns the rules of sharp, flat, uniform and tied rows, in this order."""
    return [RowRule.of(params, position=9, num_prompt=3) for params in MENU] * 4


def logits() -> Tensor:
    x_SV = torch.randn(len(MENU) * 4, NUM_COLUMNS, generator=torch.Generator().manual_seed(8))
    sharp_RV, flat_RV, _, tied_RV = x_SV.chunk(4)
    uniform_RV = torch.zeros_like(flat_RV)
    return torch.cat([6.0 * sharp_RV, 0.3 * flat_RV, uniform_RV, tied_RV.round()])


def filter_as_rank(at: Address, rank: int, size: int) -> tuple[Tensor, npt.NDArray[np.int32]]:
    """Returns the filtered rows, joined over the ranks, and the chosen tokens."""
    torch.set_num_threads(1)
    group = join_verify_stage(at, rank, timeout_s=TIMEOUT_S, size=size)
    shard = rank_range(NUM_COLUMNS, rank, size)
    local_SV = logits()[:, shard.start : shard.stop]
    rows = [row for row, rule in enumerate(rules()) if rule.params.is_filtered]
    filtered_RV = filtered(local_SV[rows], [rules()[row] for row in rows], group=group)
    choice = choose(local_SV, rules(), group=group, vocab_start=shard.start)
    return joined_over_ranks(filtered_RV, group, count=NUM_COLUMNS), choice.tokens
