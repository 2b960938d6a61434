"""A product is used only if its rows do not depend on one another."""

import logging

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.config import DType, Numerics
from eesd_dist.errors import ConfigError
from eesd_dist.model import kernels
from eesd_dist.model.elementwise import GELU_TANH, SILU, Activation, row_blocks
from eesd_dist.model.kernels import (
    TORCH_DTYPES,
    Candidate,
    Linear,
    LinearPacker,
    in_row_tiles,
    padded_rows,
    rows_are_independent,
)
from eesd_dist.model.slow_kernels import slow_kernels
from tests.support.stepwise_cpu import without_numba

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def fickle(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Adds in another order if there are more than nine rows."""

    def multiply(x_MI: Tensor) -> Tensor:
        if len(x_MI) <= 9:
            return functional.linear(x_MI, weight_OI, bias_O)
        return functional.linear(x_MI.flip(-1), weight_OI.flip(-1), bias_O)

    return multiply


def test_a_product_with_rows_that_depend_on_one_another_is_found() -> None:
    assert not rows_are_independent(
        Candidate("fickle", fickle),
        num_out=64,
        num_in=64,
        dtype=torch.float32,
        device=CPU,
        num_threads=1,
    )
    assert "products with 64 x 64 without fickle" in slow_kernels()


def test_a_machine_that_cannot_keep_the_promise_says_what_to_do() -> None:
    packer = LinearPacker(dtype="float32", numerics="invariant", device=CPU)
    packer.candidates = (Candidate("fickle", fickle),)
    with pytest.raises(ConfigError, match=r"tried: fickle.*model\.numerics to fast"):
        packer.pack(torch.randn(64, 48))


def test_fast_takes_the_first_candidate_unchecked() -> None:
    packer = LinearPacker(dtype="float32", numerics="fast", device=CPU)
    packer.candidates = (Candidate("fickle", fickle),)
    weight_OI = torch.randn(64, 48)
    assert torch.allclose(packer.pack(weight_OI)(torch.eye(48)), weight_OI.t(), atol=1e-6)


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_multiplied_with_as_they_are(
    dtype: DType, numerics: Numerics
) -> None:
    """All weights, including the smallest ones that are normal numbers."""
    packer = LinearPacker(dtype=dtype, numerics=numerics, device=CPU)
    kind = TORCH_DTYPES[dtype]
    weight_OI = torch.arange(-(2**15), 2**15).to(torch.int16).view(kind).view(256, 256)
    is_normal = weight_OI.isfinite() & (weight_OI.abs() >= torch.finfo(kind).tiny)
    weight_OI = torch.where(is_normal, weight_OI, torch.zeros((), dtype=kind))
    product_IO = packer.pack(weight_OI)(torch.eye(256, dtype=packer.compute_dtype))
    assert torch.equal(product_IO.float(), weight_OI.float().t())


def test_the_products_of_a_stage_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="eesd_dist.model.kernels")
    packer = LinearPacker(dtype="float32", numerics="invariant", device=CPU)
    packer.pack(torch.randn(64, 48))
    packer.pack(torch.randn(48, 64))
    packer.report("layers=[0,1)")
    assert caplog.messages[-1] == (
        "weights packed: layers=[0,1) dtype=float32 computed_in=float32 products=compiled-float32:2"
    )


def test_without_numba_a_cpu_only_compares() -> None:
    with without_numba():
        packer = LinearPacker(dtype="float32", numerics="fast", device=CPU)
    assert packer.candidates[0].name == "library float32"
    x_MI = torch.randn(2, 48)
    torch.testing.assert_close(packer.pack(torch.eye(48))(x_MI), x_MI)
    with (
        without_numba(),
        pytest.raises(ConfigError, match="need numba, which is not installed: install it"),
    ):
        LinearPacker(dtype="float32", numerics="invariant", device=CPU)


def test_rows_are_padded_to_counts_the_check_has_answered_for() -> None:
    counts = [padded_rows(rows, numerics="invariant", device=CPU) for rows in range(1, 9)]
    assert counts == [4, 4, 4, 4, 5, 6, 7, 8]
    assert padded_rows(7, numerics="fast", device=CPU) == 7


def test_a_gpu_needs_no_padding() -> None:
    assert padded_rows(5, numerics="invariant", device=CUDA) == 5


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("width", [1408, 9000, 40_001])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH], ids=["silu", "gelu"])
def test_a_row_has_the_same_gate_however_many_threads_and_rows_there_are(
    num_threads: int, width: int, activation: Activation
) -> None:
    x_TI = torch.randn(64, 2 * width, generator=torch.Generator().manual_seed(1)).chunk(2, -1)[0]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        batch_TI = activation(x_TI)
        for first, count in ((0, 1), (0, 2), (0, 3), (0, 50), (13, 7), (50, 14)):
            rows_TI = activation(x_TI[first : first + count])
            assert torch.equal(batch_TI[first : first + count], rows_TI)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(batch_TI, activation.function(x_TI))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_computed_in_runs_that_no_thread_cuts(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for shape in ((100, 7, 300), (5, 40_000), (0, 4), (3, 4)):
            x = torch.empty(shape)
            runs = list(row_blocks(x))
            assert [i for run in runs for i in range(shape[0])[run]] == list(range(shape[0]))
            if num_threads > 1:
                assert all(x[run].shape[0] == 1 or x[run].numel() < 32768 for run in runs)
    finally:
        torch.set_num_threads(before)


def test_calls_larger_than_any_that_was_checked_are_cut() -> None:
    seen: list[int] = []

    def noting(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        def multiply(x_MI: Tensor) -> Tensor:
            seen.append(len(x_MI))
            return functional.linear(x_MI, weight_OI, bias_O)

        return multiply

    packer = LinearPacker(dtype="float32", numerics="invariant", device=CPU)
    packer.candidates = (Candidate("noting", in_row_tiles(noting, tile_rows=4)),)
    product = packer.pack(torch.randn(24, 16))
    whole = kernels._in_checked_runs(noting(torch.eye(16), None), device=CPU)
    x_MI = torch.randn(2_001, 16)
    seen.clear()
    assert torch.equal(whole(x_MI), x_MI)
    assert max(seen) < 900
    assert all(count % 6 not in (1, 2) for count in seen)
    assert product(x_MI).shape == (2_001, 24)
