"""Noise and the choice on a GPU, in few launches. Needs Triton when it is imported."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from eesd_dist.backends.cuda.kernels.choice import best_kernel, block_kernel, gumbel_kernel
from eesd_dist.backends.cuda.kernels.filters import (
    NUM_CANDIDATES,
    NUM_DIGITS,
    NUM_SUMS,
    candidates_kernel,
    decision_kernel,
    digit_kernel,
    mass_kernel,
    ranking_kernel,
)
from eesd_dist.sampling.row_filters import RowFilters

_BLOCK = 1024
NUMBERS_PER_FILTER = 4


# Shapes: S rows, V columns, B blocks of columns, G ranks, N candidates of a row, C best scores of a
# block or a row, D digits of a score.
def gumbel_on_gpu(words_S3: npt.NDArray[np.int32], ids_V: Tensor) -> Tensor:
    """Returns the draws [S, V] of `noise.gumbel`."""
    words = torch.from_numpy(np.ascontiguousarray(words_S3)).to(ids_V.device, non_blocking=True)
    num_rows, num_columns = len(words_S3), len(ids_V)
    noise_SV = torch.empty(num_rows, num_columns, device=ids_V.device)
    gumbel_kernel[(num_rows, triton.cdiv(num_columns, _BLOCK))](
        words,
        ids_V.to(torch.int32),
        noise_SV,
        num_columns,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return noise_SV


def best_two_on_gpu(
    logits_SV: Tensor,
    divisors: Sequence[float],
    words_S3: npt.NDArray[np.int32],
    vocab_ids: Tensor | None,
    filters: RowFilters | None = None,
) -> Tensor:
    """Returns `best_two` with noise and filters from the host.

    `divisors`: temperatures, 0 for a row without noise.
    """
    num_rows, device = len(divisors), logits_SV.device
    noise = torch.from_numpy(packed_noise(divisors, words_S3, num_padded=num_rows))
    filters_S4 = None
    if filters is not None:
        packed = torch.from_numpy(packed_filters(filters, num_padded=num_rows))
        filters_S4 = packed.to(device, non_blocking=True)
    return best_two(logits_SV, noise.to(device, non_blocking=True), vocab_ids, filters_S4)


def packed_noise(
    divisors: Sequence[float], words_S3: npt.NDArray[np.int32], *, num_padded: int
) -> npt.NDArray[np.int32]:
    """Returns the divisors' bits, then the words of the keys, one upload; padding has no noise."""
    packed = np.zeros(4 * num_padded, np.int32)
    packed[: len(divisors)] = np.array(divisors, np.float32).view(np.int32)
    packed[num_padded : num_padded + words_S3.size] = words_S3.ravel()
    return packed


def packed_filters(filters: RowFilters, *, num_padded: int) -> npt.NDArray[np.int32]:
    """Returns, for each row, top_k, the bits of the logarithm of min_p, and both halves of top_p;
    padding has no filter."""
    count = len(filters.top_k_S)
    rows = RowFilters(
        *(
            np.concatenate([own, nothing])
            for own, nothing in zip(filters, RowFilters.none(num_padded - count), strict=True)
        )
    )
    packed_S4 = np.column_stack(
        [rows.top_k_S, rows.log_min_p_S.view(np.int32), rows.top_p_S.view(np.int32).reshape(-1, 2)]
    )
    return packed_S4.ravel()


def best_two(
    logits_SV: Tensor,
    noise: Tensor,
    vocab_ids: Tensor | None,
    filters_S4: Tensor | None = None,
) -> Tensor:
    """Returns [S, 4] int32: the tokens of each row's two best scores, of equal ones the first, and
    the bits of the scores. There must be two columns; everything is on one device.

    `noise`: `packed_noise`; `vocab_ids`: tokens of the columns; `filters_S4`: `packed_filters`. The
    first score is NaN where filters leave none of the `NUM_CANDIDATES` best tokens; the second one
    is -inf where they leave one of them.
    """
    device, (num_rows, num_columns) = logits_SV.device, logits_SV.shape
    logits_SV = logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
    if filters_S4 is not None:
        return _best_two_left(logits_SV, noise, vocab_ids, filters_S4)
    num_blocks = triton.cdiv(num_columns, _BLOCK)
    scores_SB2 = torch.empty(num_rows, num_blocks, 2, device=device)
    columns_SB2 = torch.empty(num_rows, num_blocks, 2, device=device, dtype=torch.int32)
    best_S4 = torch.empty(num_rows, 4, device=device, dtype=torch.int32)
    ids = noise if vocab_ids is None else vocab_ids
    block_kernel[(num_rows, num_blocks)](
        logits_SV,
        noise[:num_rows].view(torch.float32),
        noise[num_rows:],
        ids,
        scores_SB2,
        columns_SB2,
        num_columns,
        logits_SV.stride(0),
        HAS_IDS=vocab_ids is not None,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    best_kernel[(num_rows,)](
        scores_SB2,
        columns_SB2,
        ids,
        best_S4,
        2 * num_blocks,
        HAS_IDS=vocab_ids is not None,
        PADDED=triton.next_power_of_2(2 * num_blocks),
    )
    return best_S4


def _best_two_left(
    logits_SV: Tensor, noise: Tensor, vocab_ids: Tensor | None, filters_S4: Tensor
) -> Tensor:
    """Returns `best_two` of what the filters leave."""
    device, (num_rows, num_columns) = logits_SV.device, logits_SV.shape
    num_blocks = triton.cdiv(num_columns, _BLOCK)
    by_block, by_row = (num_rows, num_blocks), (num_rows,)
    divisor_S, row_stride = noise[:num_rows].view(torch.float32), logits_SV.stride(0)
    ids = noise if vocab_ids is None else vocab_ids

    def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    scores_SBC = memory(*by_block, NUM_CANDIDATES)
    columns_SBC = memory(*by_block, NUM_CANDIDATES, dtype=torch.int32)
    peaks_SB, peak_S = memory(*by_block), memory(num_rows)
    counts_SD256 = memory(num_rows, NUM_DIGITS, 256, dtype=torch.int32)
    candidates_kernel[by_block](
        logits_SV,
        divisor_S,
        noise[num_rows:],
        ids,
        scores_SBC,
        columns_SBC,
        peaks_SB,
        counts_SD256,
        num_columns,
        row_stride,
        HAS_IDS=vocab_ids is not None,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    scores_SC = memory(num_rows, NUM_CANDIDATES)
    columns_SC = memory(num_rows, NUM_CANDIDATES, dtype=torch.int32)
    padded_blocks = triton.next_power_of_2(num_blocks)
    ranking_kernel[by_row](
        scores_SBC,
        columns_SBC,
        peaks_SB,
        scores_SC,
        columns_SC,
        peak_S,
        num_blocks,
        PADDED_BLOCKS=padded_blocks,
        PADDED=NUM_CANDIDATES * padded_blocks,
    )
    for digit in range(NUM_DIGITS):
        digit_kernel[by_block](
            logits_SV,
            divisor_S,
            filters_S4,
            counts_SD256,
            num_columns,
            row_stride,
            AT=digit,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
    masses = memory(*by_block, NUM_SUMS, dtype=torch.int64)
    numbers = memory(*by_block, NUM_CANDIDATES, dtype=torch.int32)
    mass_kernel[by_block](
        logits_SV,
        divisor_S,
        filters_S4,
        columns_SC,
        peak_S,
        counts_SD256,
        masses,
        numbers,
        num_columns,
        row_stride,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    best_S4 = memory(num_rows, 4, dtype=torch.int32)
    decision_kernel[by_row](
        logits_SV,
        divisor_S,
        filters_S4,
        scores_SC,
        columns_SC,
        peak_S,
        masses,
        numbers,
        ids,
        best_S4,
        num_blocks,
        num_columns,
        row_stride,
        HAS_IDS=vocab_ids is not None,
        PADDED_BLOCKS=padded_blocks,
        enable_fp_fusion=False,
    )
    return best_S4


def best_two_of_ranks(best_GS4: Tensor, *, vocab_size: int) -> Tensor:
    """Returns `best_two` [S, 4] over the columns of all ranks, which are in rank order, from that
    of each. Tokens are below `vocab_size` whatever is in the memory of a rank that was lost: they
    may be embedded before the loss is known."""
    num_ranks, num_rows, _ = best_GS4.shape
    num_candidates = 2 * num_ranks
    tokens_SG2 = best_GS4[:, :, :2].transpose(0, 1).clamp(0, vocab_size - 1)
    scores_SG2 = best_GS4[:, :, 2:].transpose(0, 1).contiguous().view(torch.float32)
    places_SN = torch.arange(
        num_rows * num_candidates, dtype=torch.int32, device=best_GS4.device
    ).view(num_rows, num_candidates)
    best_S4 = torch.empty(num_rows, 4, device=best_GS4.device, dtype=torch.int32)
    best_kernel[(num_rows,)](
        scores_SG2,
        places_SN,
        tokens_SG2.contiguous(),
        best_S4,
        num_candidates,
        HAS_IDS=True,
        PADDED=triton.next_power_of_2(num_candidates),
    )
    return best_S4
