"""A product is used only if its rows do not depend on one another."""

import logging

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.config import Numerics
from eesd_dist.errors import ConfigError
from eesd_dist.model import kernels
from eesd_dist.model.elementwise import GELU_TANH, SILU, Activation, row_blocks
from eesd_dist.model.kernels import (
    Candidate,
    Linear,
    LinearPacker,
    in_row_tiles,
    padded_rows,
    rows_are_independent,
)

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
def test_bfloat16_weights_are_multiplied_with_exactly(numerics: Numerics) -> None:
    packer = LinearPacker(dtype="bfloat16", numerics=numerics, device=CPU)
    sizes = 2.0 ** torch.arange(-17, 16)
    weight_OI = (sizes * (1 + torch.arange(33) / 128)).bfloat16().diag().repeat(4, 1)
    bias_O = torch.randn(132).bfloat16()
    found = packer.pack(weight_OI, bias_O)(torch.ones(5, 33, dtype=packer.compute_dtype))
    expected_O = weight_OI.float().sum(1) + bias_O.float()
    if packer.compute_dtype == torch.float32:
        assert torch.equal(found, expected_O.expand(5, -1))


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_float16_weights_are_multiplied_with_exactly(numerics: Numerics) -> None:
    """All weights, including subnormal ones."""
    packer = LinearPacker(dtype="float16", numerics=numerics, device=CPU)
    assert packer.compute_dtype == torch.float32
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    weight_OI = bits.view(torch.float16).view(256, 256)
    weight_OI = torch.where(weight_OI.isfinite(), weight_OI, torch.zeros(()).half())
    found_IO = packer.pack(weight_OI)(torch.eye(256))
    assert torch.equal(found_IO, weight_OI.float().t())


def test_weights_that_a_product_rounds_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="eesd_dist.model.kernels")
    packer = LinearPacker(dtype="bfloat16", numerics="invariant", device=CPU)
    generator = torch.Generator().manual_seed(3)
    weight_OI = (torch.randn(640, 640, generator=generator) * 1e-4).bfloat16()
    weight_OI[0, :4] = torch.tensor([0.0, 2.0**-17, 2.0**-24, 2.0**-30]).bfloat16()
    found_IO = packer.pack(weight_OI)(torch.eye(640))
    num_rounded = int((found_IO.t() != weight_OI.float()).sum())
    packer.pack(weight_OI.abs() + 1)
    packer.report("layers=[0,1)")
    if packer.candidates[0].name.startswith("fbgemm"):
        assert torch.equal(found_IO[:4, 0], torch.tensor([0.0, 2.0**-17, 2.0**-24, 0.0]))
        assert num_rounded > 1000
    product = packer.candidates[0].name.replace(" ", "-")
    assert caplog.messages[-1] == (
        "weights packed: layers=[0,1) dtype=bfloat16 computed_in=float32 "
        f"products={product}:2 rounded={num_rounded} of={2 * 640 * 640}"
    )


def test_a_weight_too_large_for_half_precision_goes_to_another_candidate() -> None:
    packer = LinearPacker(dtype="bfloat16", numerics="invariant", device=CPU)
    weight_OI = torch.full((16, 32), 1e6).bfloat16()
    found = packer.pack(weight_OI)(torch.ones(4, 32))
    assert torch.equal(found, weight_OI.float().sum(1).expand(4, -1))


def test_rows_are_padded_to_counts_the_check_has_answered_for() -> None:
    counts = [padded_rows(rows, numerics="invariant", device=CPU) for rows in range(1, 100)]
    assert counts[:9] == [4, 4, 4, 4, 5, 6, 9, 9, 9]
    assert all(count % 6 not in (1, 2) for count in counts)
    assert all(0 <= count - rows <= 3 for rows, count in enumerate(counts, start=1))
    assert padded_rows(7, numerics="fast", device=CPU) == 7


def test_a_gpu_sees_few_row_counts() -> None:
    counts = {padded_rows(rows, numerics="invariant", device=CUDA) for rows in range(1, 513)}
    assert counts == {16, 32, 64, 128, 256, 512}


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
        together = activation(x_TI)
        for first, count in ((0, 1), (0, 2), (0, 3), (0, 50), (13, 7), (50, 14)):
            alone = activation(x_TI[first : first + count])
            assert torch.equal(together[first : first + count], alone)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(together, activation.function(x_TI))


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
