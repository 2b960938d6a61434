"""The compiled product: exact sums, and every row's bits against the row alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_dist.backends.cpu import calls, packed
from eesd_dist.backends.cpu.kernels import tiles
from eesd_dist.backends.cpu.packed import PAIRS, PackedProduct, kind_for, padded_vector
from eesd_dist.model.layers.norms import RmsNorm

KINDS = [
    np.dtype(np.float32),
    np.dtype(np.uint16),
    *([np.dtype(np.int16)] if tiles.host_features().get("f16c") else []),
    *([PAIRS] if tiles.multiplies_bfloat16() else []),
]


def product(
    num_out: int, num_in: int, kind: np.dtype[np.generic], *, bias: bool = False, seed: int = 0
) -> tuple[PackedProduct, torch.Tensor, torch.Tensor]:
    """Returns the product, its weights as float64, and its bias."""
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(num_out, num_in, generator=generator).to(packed._KINDS[kind])
    bias_O = torch.randn(num_out, generator=generator) * bias
    return PackedProduct(weight_OI, bias_O if bias else None, kind), weight_OI.double(), bias_O


def as_inputs(x_MI: torch.Tensor, kind: np.dtype[np.generic]) -> torch.Tensor:
    return x_MI.bfloat16().double() if kind == PAIRS else x_MI.double()


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    num_rows=st.integers(1, 40),
    num_out=st.integers(1, 130),
    num_in=st.integers(1, 150) | st.integers(250, 800),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_product_is_the_sum_and_a_row_the_same_alone(
    kind: np.dtype[np.generic], num_rows: int, num_out: int, num_in: int, bias: bool, seed: int
) -> None:
    multiply, weight_OI, bias_O = product(num_out, num_in, kind, bias=bias, seed=seed)
    x_MI = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(seed + 1))
    product_MO = multiply(x_MI)
    inputs_MI = as_inputs(x_MI, kind)
    expected_MO = inputs_MI @ weight_OI.t() + bias_O
    bound_MO = (inputs_MI.abs() @ weight_OI.abs().t() + bias_O.abs()) * num_in * 2**-23
    assert bool(((product_MO - expected_MO).abs() <= bound_MO + 1e-30).all())
    for row in range(num_rows):
        assert torch.equal(multiply(x_MI[row : row + 1])[0], product_MO[row])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, kind: np.dtype[np.generic]) -> None:
    multiply, _, _ = product(200, 600, kind, bias=True)
    x_MI = torch.randn(50, 600)
    expected_MO = multiply(x_MI)
    monkeypatch.setattr(calls, "_WORTH_A_THREAD", 1)
    for num_threads in (2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        for rows in (1, 2, 50):
            assert torch.equal(multiply(x_MI[:rows]), expected_MO[:rows])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_was_in_memory_before_is_in_no_sum(kind: np.dtype[np.generic]) -> None:
    multiply, _, _ = product(200, 600, kind)
    x_MI = torch.randn(20, 600)
    expected_MO = multiply(x_MI)
    torch.use_deterministic_algorithms(True)  # fills new memory with what is no number
    try:
        assert torch.empty(4).isnan().all()
        assert torch.equal(multiply(x_MI), expected_MO)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_norm_before_a_product_is_the_norm(kind: np.dtype[np.generic]) -> None:
    multiply, _, _ = product(64, 70, kind)
    norm = RmsNorm(torch.rand(70) + 0.5, eps=1e-5, dtype=torch.float32)
    x_MI = torch.randn(9, 70) * 3
    product_MO = multiply.after_norm(x_MI, padded_vector(norm.scaled_weight_D), norm.floor)
    # Rounded to bfloat16, neighbours may differ by one step of it.
    tolerance = 0.05 if kind == PAIRS else 1e-5
    torch.testing.assert_close(product_MO, multiply(norm(x_MI)), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_no_number_stays_in_its_row(kind: np.dtype[np.generic]) -> None:
    multiply, _, _ = product(40, 33, kind)
    x_MI = torch.randn(5, 33)
    expected_MO = multiply(x_MI)
    # The second one has all its bits set: rounded carelessly it would become a number.
    for strange in (
        torch.tensor(torch.inf),
        torch.tensor(-1, dtype=torch.int32).view(torch.float32),
    ):
        spoilt_MI = x_MI.clone()
        spoilt_MI[2, 32] = strange
        product_MO = multiply(spoilt_MI)
        assert not bool(product_MO[2].isfinite().any())
        others = torch.tensor([0, 1, 3, 4])
        assert torch.equal(product_MO[others], expected_MO[others])


def test_inputs_are_rounded_to_the_nearest_even() -> None:
    if PAIRS not in KINDS:
        pytest.skip("this processor does not multiply bfloat16")
    multiply = PackedProduct(torch.eye(64).bfloat16(), None, PAIRS)
    ties = (torch.arange(64) << 15 | 0x3F800000).to(torch.int32).view(torch.float32)
    x_MI = torch.stack([ties, -ties, torch.randn(64), torch.rand(64) * 1e-30])
    assert torch.equal(multiply(x_MI), x_MI.bfloat16().float())


@pytest.mark.parametrize(
    ("features", "kinds"),
    [
        ({"avx512f", "avx512bf16", "f16c"}, (np.int32, np.int16)),
        ({"f16c"}, (np.uint16, np.int16)),
        (set(), (np.uint16, np.float32)),
    ],
)
def test_the_kind_follows_from_the_processor(
    monkeypatch: pytest.MonkeyPatch, features: set[str], kinds: tuple[type, type]
) -> None:
    present = dict.fromkeys(features, True)
    monkeypatch.setattr(tiles, "host_features", lambda: present)
    monkeypatch.setattr(packed, "host_features", lambda: present)
    assert (kind_for(torch.bfloat16), kind_for(torch.float16)) == kinds
    assert kind_for(torch.float32) == np.float32


def test_no_call_compiles_a_kind_again() -> None:
    kernel = packed.product_kernel()
    for kind in KINDS:
        for rows, bias in ((1, True), (30, False)):
            multiply, _, _ = product(40, 33, kind, bias=bias)
            multiply(torch.randn(rows, 33))
            multiply.after_norm(torch.randn(rows, 33), padded_vector(torch.ones(33)), 0.1)
    assert len(kernel.signatures) <= len(KINDS)
