"""Groups of ranks on the device: sums, gathers and broadcasts over NCCL and links, and the deadline
of a stuck kernel."""

import pytest
import torch

from tests.gpu.ranks import exchange, exchange_and_abort, run_ranks, skip_a_sum

pytestmark = pytest.mark.gpu


def test_a_group_of_one_rank_sums_and_is_aborted(num_gpus: int) -> None:
    run_ranks(exchange_and_abort, ["cuda:0"])


def test_ranks_sum_gather_and_broadcast_over_nccl(num_gpus: int) -> None:
    size = min(max(num_gpus, 2), 4)
    run_ranks(exchange, [f"cuda:{rank % num_gpus}" for rank in range(size)])


def test_ranks_sum_gather_and_broadcast_tensors_of_the_device_over_links(
    device: torch.device,
) -> None:
    run_ranks(exchange, [f"cpu<-{device}"] * 2)


def test_a_stuck_kernel_is_aborted_at_its_deadline(num_gpus: int) -> None:
    run_ranks(skip_a_sum, ["cuda:0", f"cuda:{min(num_gpus - 1, 1)}"])
