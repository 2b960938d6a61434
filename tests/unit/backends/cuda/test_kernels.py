"""GPU kernels: what they compute in Triton's interpreter, and that they compile for a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from eesd_dist.backends.cuda.engine import CudaEngine
from eesd_dist.backends.cuda.kernels.launches import is_hopper
from eesd_dist.backends.cuda.product import Tile, TiledProduct, tile_for
from eesd_dist.backends.cuda.rows import activated, normed
from eesd_dist.model import kernels
from eesd_dist.model.elementwise import GELU_TANH, SILU, Activation
from eesd_dist.model.layers.norms import RmsNorm


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 40, 65, 130])
@pytest.mark.parametrize(("num_out", "num_in"), [(70, 64), (33, 300)])
def test_a_tiled_product_is_the_product(num_rows: int, num_out: int, num_in: int) -> None:
    """In float16, since the interpreter has no bfloat16."""
    generator = torch.Generator().manual_seed(num_rows)
    weight_OI = torch.randn(num_out, num_in, generator=generator).half()
    bias_O = torch.randn(num_out, generator=generator).half()
    x_MI = torch.randn(num_rows, num_in, generator=generator).half()
    exact_MO = x_MI.double() @ weight_OI.double().T
    for bias, expected_MO in ((None, exact_MO), (bias_O, exact_MO + bias_O.double())):
        y_MO = TiledProduct(weight_OI, bias)(x_MI)
        assert y_MO.dtype == torch.float16
        torch.testing.assert_close(y_MO.double(), expected_MO, rtol=2**-10, atol=2**-8)
        if num_in % 8 == 0:  # as on a Hopper
            product = TiledProduct(weight_OI, bias)
            product._is_hopper = product._has_descriptors = True
            torch.testing.assert_close(product(x_MI), y_MO, rtol=2**-10, atol=2**-8)


def test_tiles_leave_a_program_for_each_multiprocessor_where_they_can() -> None:
    assert tile_for(1, 128_256).channels == 64
    assert tile_for(1, 4096).channels == 32
    assert tile_for(1, 1280).channels == 16
    assert tile_for(16, 4096).rows == 16
    assert tile_for(17, 4096).rows == 64
    assert tile_for(4096, 4096).channels == 128
    assert tile_for(65, 4096).channels == 64


@pytest.mark.parametrize(
    ("num_rows", "channels"),
    [
        # out channels of Llama 3 8B: qkv, o and down, gate_up, LM head
        (1, {6144: 16, 4096: 32, 28_672: 64, 128_256: 64}),
        (64, {6144: 64, 4096: 32, 28_672: 128, 128_256: 128}),
        (128, {6144: 128, 4096: 64, 28_672: 128, 128_256: 128}),
        (320, {6144: 256, 4096: 256, 28_672: 256, 128_256: 256}),
    ],
)
def test_tiles_of_a_hopper_are_the_fastest_measured(
    num_rows: int, channels: dict[int, int]
) -> None:
    for num_out, expected in channels.items():
        assert tile_for(num_rows, num_out, is_hopper=True).channels == expected, num_out


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)
def test_tiles_of_a_hopper_need_its_shared_memory(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of capability 12 has 99 KiB for a program, and such tiles did not start there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert is_hopper.__wrapped__(torch.device("cuda", 0)) is expected


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("num_out", [128, 1024, 1280, 2048, 4096, 6144, 8192, 28_672, 128_256])
def test_the_row_counts_of_the_self_check_have_every_tile(num_out: int, is_hopper: bool) -> None:
    def tiles(counts: Iterable[int]) -> set[Tile]:
        return {tile_for(num_rows, num_out, is_hopper=is_hopper) for num_rows in counts}

    assert tiles(range(1, 5000)) == tiles(kernels._CHECKED_ROWS)


@pytest.mark.parametrize("width", [64, 100, 2048])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_with_a_sum_is_the_norm_of_the_sum(width: int, offset: float) -> None:
    x_TD, addend_TD = torch.randn(5, width), torch.randn(5, width)
    norm = RmsNorm(torch.rand(width), eps=1e-5, dtype=torch.float32, offset=offset)
    torch.testing.assert_close(normed(norm, x_TD.clone(), None), norm(x_TD))
    total_TD = x_TD.clone()
    torch.testing.assert_close(normed(norm, total_TD, addend_TD), norm(x_TD + addend_TD))
    assert torch.equal(total_TD, x_TD + addend_TD)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH], ids=["silu", "gelu"])
@pytest.mark.parametrize("width", [96, 1500])
def test_gates_are_applied(activation: Activation, width: int) -> None:
    gate_up = 3 * torch.randn(4, 2 * width)
    gate_TI, up_TI = gate_up.chunk(2, dim=-1)
    gated_TI = activated(gate_up, is_silu=activation is SILU)
    torch.testing.assert_close(gated_TI, activation(gate_TI) * up_TI, rtol=1e-5, atol=1e-5)


def test_products_in_float32_are_not_tf32_whatever_the_environment_sets() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        CudaEngine().warm_up()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


_COMPILE = """
import warnings
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from eesd_dist.backends.cuda.kernels import attention, choice, filters, product, rows as row_kernels
from eesd_dist.transport.symmetric import kernel as symmetric

warnings.simplefilter("ignore")
layout = dict(NUM_KV=8, CHANNELS=128, PAGE_SIZE=32, KEY_NUMBERS=4096, VALUE_WIDTH=128)
placed = dict(position_T="*i32", kv_slot_T="*i32", table_T="*i32", slots="*i32")
rows = dict(tiles_B8="*i32", slots="*i32")
dependent = dict(IS_DEPENDENT=True)
rowwise = dict(logits="*fp32", divisor_S="*fp32", num_columns="i32", row_stride="i32")
heads = dict(heads="*bf16", pages="*bf16")
kernels = [
    (attention.attend_kernel,
     dict(**heads, mixed="*bf16", weights="*fp32", **rows, window="i32", scale="fp32",
          softcap="fp32"),
     dict(**layout, **dependent, PER_KV=4, HAS_SOFTCAP=split > 1, QUERIES=queries,
          PADDED_CHANNELS=128, KEYS=128, PART_BLOCKS=4, SPLIT_BLOCKS=split))
    for queries, split in ((16, 4), (32, 1), (64, 0))
] + [
    (attention.merge_kernel,
     dict(splits="*fp32", weights="*fp32", mixed="*bf16", position_R="*i32", window="i32",
          num_splits="i32"),
     dict(**dependent, NUM_HEADS=32, CHANNELS=128, PADDED_CHANNELS=128, KEYS=128, PART_BLOCKS=4,
          SPLIT_BLOCKS=1)),
] + [
    (row_kernels.store_kernel,
     dict(**heads, rotation="*fp32", norm_weight=weight, norm_eps="fp32", **placed),
     dict(**layout, **dependent, NUM_QUERIES=32, HAS_ROTATION=True, HAS_NORM=True, PAIRS=64))
    for weight in ("*bf16", "*fp32")
] + [
    (row_kernels.norm_kernel,
     dict(x="*bf16", addend="*bf16", weight_D="*fp32", normed="*bf16", floor="fp32"),
     dict(**dependent, WIDTH=4096, HAS_ADDED=True, PADDED_WIDTH=4096)),
    (row_kernels.activation_kernel, dict(gate_up="*bf16", activated="*bf16"),
     dict(**dependent, WIDTH=14336, IS_SILU=True, BLOCK=1024)),
    (row_kernels.activation_kernel, dict(gate_up="*bf16", activated="*bf16"),
     dict(**dependent, WIDTH=14336, IS_SILU=False, BLOCK=1024)),
    (product.product_kernel,
     dict(x="*bf16", weight="*bf16", bias="*bf16", y="*bf16", num_rows="i32", num_out="i32",
          num_in="i32"),
     dict(**dependent, HAS_BIAS=True, IS_EVEN=False, ROWS=16, CHANNELS=32, DEPTH=128)),
    (product.descriptor_product_kernel,
     dict(x="tensordesc<bf16[64, 128]>", weight="tensordesc<bf16[64, 128]>", bias="*bf16",
          y="*bf16", num_rows="i32", num_out="i32", num_in="i32"),
     dict(**dependent, HAS_BIAS=True, ROWS=64, CHANNELS=64, DEPTH=128)),
    (choice.gumbel_kernel,
     dict(words_S3="*i32", ids="*i32", noise="*fp32", num_columns="i32"), dict(BLOCK=1024)),
    (choice.block_kernel,
     dict(logits="*fp32", divisor_S="*fp32", words_S3="*i32", ids="*i32", scores="*fp32",
          columns="*i32", num_columns="i32", row_stride="i32"),
     dict(HAS_IDS=True, BLOCK=1024)),
    (choice.best_kernel,
     dict(scores="*fp32", columns="*i32", ids="*i64", best="*i32", num_candidates="i32"),
     dict(HAS_IDS=True, PADDED=256)),
    (filters.candidates_kernel,
     dict(**rowwise, words_S3="*i32", ids="*i32", scores="*fp32", columns="*i32", peaks="*fp32",
          counts="*i32"),
     dict(HAS_IDS=True, BLOCK=1024)),
    (filters.ranking_kernel,
     dict(scores="*fp32", columns="*i32", peaks="*fp32", scores_SC="*fp32", columns_SC="*i32",
          peak_S="*fp32", num_blocks="i32"),
     dict(PADDED_BLOCKS=128, PADDED=1024)),
    (filters.mass_kernel,
     dict(**rowwise, filters_S4="*i32", columns_SC="*i32", peak_S="*fp32", counts="*i32",
          masses="*i64", numbers="*i32"),
     dict(BLOCK=1024)),
    (filters.decision_kernel,
     dict(**rowwise, filters_S4="*i32", scores_SC="*fp32", columns_SC="*i32", peak_S="*fp32",
          masses="*i64", numbers="*i32", ids="*i32", best="*i32", num_blocks="i32"),
     dict(HAS_IDS=True, PADDED_BLOCKS=128)),
] + [
    (filters.digit_kernel, dict(**rowwise, filters_S4="*i32", counts="*i32"),
     dict(AT=at, BLOCK=1024))
    for at in (0, 3)
] + [
    (kernel, dict(x="*bf16", bases="*i64", counts="*i32", num="i32", **{out: "*bf16"}),
     dict(RANK=1, SIZE=8, PROGRAMS=16, DATA=1 << 16, CAPACITY=1 << 22, TILE=2048, **constants))
    for kernel, out, constants in (
        (symmetric.sum_kernel, "total", dict(IN_SHARES=True)),
        (symmetric.sum_kernel, "total", dict(IN_SHARES=False)),
        (symmetric.gather_kernel, "gathered", {}),
    )
] + [
    (symmetric.sum_kernel,
     dict(x="*bf16", total="*fp32", bases="*i64", counts="*i32", num="i32"),
     dict(RANK=1, SIZE=8, PROGRAMS=16, DATA=1 << 16, CAPACITY=1 << 22, TILE=2048,
          IN_SHARES=False)),
    (symmetric.gathered_sum_kernel, dict(x_GN="*fp32", total_N="*bf16", num="i32"),
     dict(SIZE=2, BLOCK=1024)),
    (symmetric.gathered_sum_kernel, dict(x_GN="*bf16", total_N="*bf16", num="i32"),
     dict(SIZE=16, BLOCK=1024)),
]
unfused = (
    attention.attend_kernel, attention.merge_kernel, choice.gumbel_kernel,
    choice.block_kernel, filters.candidates_kernel, filters.digit_kernel, filters.mass_kernel,
    filters.decision_kernel,
)
for kernel, arguments, constants in kernels:
    types = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=constants)
    options = {"enable_fp_fusion": kernel not in unfused}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, len(compiled.asm["cubin"]), compiled.asm["ptx"].count("fma.rn.f32"))
"""


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts code that the compiler rejects. Compiling needs no GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) == 26
    assert all(int(size) > 1000 for _, size, _ in kernels)
    # What is compared bit for bit with a CPU may round only as a CPU does.
    fused = {name: int(count) for name, _, count in kernels}
    assert not fused["gumbel_kernel"]
    assert not fused["block_kernel"]
    assert not fused["merge_kernel"]
    assert fused["store_kernel"]
