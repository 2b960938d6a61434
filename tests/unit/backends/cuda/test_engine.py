"""What a GPU says of itself to ranks that may exchange pages with it."""

import pytest
import torch
import triton

from eesd_dist.backends.cuda.engine import CudaEngine


def test_the_compiler_of_the_kernels_is_part_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    machine = CudaEngine().machine(
        torch.device("cuda"), dtype="bfloat16", numerics="invariant", num_threads=1
    )
    assert machine == f"H200, Triton {triton.__version__}"
