"""The work of each rank of a tensor-parallel span in these tests; cheap to import in a peer."""

from pathlib import Path

import torch
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.transport.authentication.handshake import Address
from tests.dist.transport.peers import join_verify_stage
from tests.unit.model.paged_stages import Stages

NUM_TOKENS = 60
TIMEOUT_S = 20.0


def tokens() -> Tensor:
    return torch.randint(0, 96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5))


def compute_as_rank(
    at: Address, rank: int, folder: Path, dtype: DType, size: int, in_memory: bool
) -> list[Tensor]:
    """Returns the full-vocabulary logits of a prefill and of plain decoding, gathered from all
    ranks. `in_memory`: they sum inside of compiled calls."""
    torch.set_num_threads(1)
    group = join_verify_stage(at, rank, timeout_s=TIMEOUT_S, size=size, in_memory=in_memory)
    stages = Stages.load(folder, group=group, dtype=dtype)
    chunks = [25, 7, 28]
    runs = [
        stages.run_in_chunks(tokens(), pages=range(4), chunks=chunks),
        stages.run_in_chunks(tokens(), pages=range(8, 12), chunks=[1] * NUM_TOKENS),
    ]
    return [torch.cat(group.all_gather(shard_TV), dim=1) for shard_TV in runs]
