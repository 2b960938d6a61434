"""Work of the training processes in these tests: several training runs, one after another."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from eesd_dist.distill.train.loop import train_rank
from eesd_dist.distill.train.request import TrainRequest


def train_as_rank(
    rendezvous: Path, rank: int, world_size: int, requests: Sequence[TrainRequest]
) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    for request in requests:
        train_rank(request, rank=rank, world_size=world_size)
    dist.destroy_process_group()
