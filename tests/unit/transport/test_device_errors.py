"""Errors of NCCL name a peer, and errors of a rank's own device that rank; without a GPU."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eesd_dist.errors import EngineError, PeerLost
from eesd_dist.transport.group import ProcessGroup
from eesd_dist.transport.link_plane import LinkPlane
from eesd_dist.transport.nccl import NcclPlane
from eesd_dist.transport.transfers import Tag

ON_DEVICE: Tensor = cast(
    Tensor,
    SimpleNamespace(
        device=torch.device("cuda", 0), nbytes=4, numel=lambda: 1, contiguous=lambda: ON_DEVICE
    ),
)


class FailingPlane:
    """Every operation fails; `lost` is the work that the watchdog has given up."""

    lost: str | None = None

    def __init__(self, kind: type[RuntimeError] = torch.distributed.DistBackendError) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        def fails(*_: object, **__: object) -> None:
            raise self._kind(f"NCCL error in {name}: remote process exited")

        return fails


def group(plane: FailingPlane) -> ProcessGroup:
    return ProcessGroup(
        name="verify",
        epoch=3,
        rank=0,
        members=("verify rank 0", "verify rank 1", "verify rank 2"),
        timeout_s=5.0,
        device=torch.device("cpu"),
        links=cast(LinkPlane, None),
        nccl=cast(NcclPlane, plane),
    )


def test_a_collective_that_nccl_refuses_names_all_other_ranks() -> None:
    failing = group(FailingPlane())
    for operation in (failing.all_reduce, failing.broadcast):
        with pytest.raises(PeerLost, match="verify rank 1 or verify rank 2") as failure:
            operation(ON_DEVICE)
        assert "NCCL error" in str(failure.value)


def test_a_transfer_that_nccl_refuses_names_its_peer() -> None:
    with pytest.raises(PeerLost, match="lost verify rank 2 during round 7"):
        group(FailingPlane()).isend(ON_DEVICE, to=2, tag=Tag.ROUND, operation="round 7")


@pytest.mark.parametrize("kind", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_what_this_ranks_own_device_raises_names_this_rank(kind: type[RuntimeError]) -> None:
    failing = group(FailingPlane(kind))
    assert failing.number is None
    failing.doing(7)
    assert failing.number == 7
    with pytest.raises(EngineError, match=r"verify rank 0 .* own device .* of round 7") as failure:
        failing.all_reduce(ON_DEVICE)
    assert not isinstance(failure.value, PeerLost)
    assert isinstance(failure.value.__cause__, kind)
    with pytest.raises(EngineError, match="verify rank 0 failed on its own device") as failure:
        failing.isend(ON_DEVICE, to=2, tag=Tag.ROUND, operation="round 7")
    assert "verify rank 2" not in str(failure.value)


def test_what_follows_from_work_that_was_given_up_is_still_that_peers_loss() -> None:
    plane = FailingPlane(torch.AcceleratorError)
    ranks = group(plane)
    plane.lost = "all_reduce of round 8"
    with pytest.raises(PeerLost, match="all_reduce of round 8"):
        ranks.all_reduce(ON_DEVICE)


def test_what_is_raised_after_work_was_given_up_is_that_peers_loss() -> None:
    plane = FailingPlane()
    ranks = group(plane)
    with pytest.raises(ZeroDivisionError), ranks.raises_lost_peers():
        raise ZeroDivisionError
    plane.lost = "all_reduce of round 8"
    with pytest.raises(PeerLost, match="all_reduce of round 8"), ranks.raises_lost_peers():
        raise ZeroDivisionError
