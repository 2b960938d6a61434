"""Work of the training processes in these tests: several training runs, one after another."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from eesd_dist.distill.train.loop import Run, train_rank
from eesd_dist.distill.train.request import TrainRequest


def train_and_die(
    rendezvous: Path, rank: int, world_size: int, request: TrainRequest, num_saved: int
) -> None:
    """Ends the process without any cleaning up, after the given number of checkpoints."""
    save = Run._save
    saved = []

    def save_or_die(run: Run) -> None:
        save(run)
        saved.append(run)
        if len(saved) == num_saved:
            os._exit(1)

    Run._save = save_or_die  # type: ignore[method-assign]
    train_as_rank(rendezvous, rank, world_size, [request])


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
