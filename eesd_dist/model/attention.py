"""Attention over paged keys and values, and over whole sequences.

Computes attention; the caller chooses the rows and the keys. Query heads arrive in the order (query
within group, KV head), so that the queries of one KV head have a constant stride and the result is
a row again without a copy.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.model.answers import kept
from eesd_dist.model.elementwise import soft_capped
from eesd_dist.model.families.family import PLAIN_SCORES, Scores
from eesd_dist.model.rows import (
    QUERY_BLOCK,
    AttentionGroup,
    AttentionKind,
    RowPlan,
    RowSegment,
)

logger = logging.getLogger(__name__)

# Shapes: T rows, H heads of all kinds (queries, then keys, then values), K KV heads, G queries per
# KV head, E channels of a head, S slots, N keys, B sequences, L their length. In content_B, B is
# bytes. Where heads are grouped by KV head, Q is the queries of a group.
Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""queries_BKQE, keys_BKNE, values_BKNE and the additive mask -> mixed_BKQE."""


def mix_of(scores: Scores) -> Mix:
    """Returns the library's attention, or plain operations where it does not support the scores."""
    if scores.softcap is not None:
        return partial(_mix_capped, scale=scores.scale, softcap=scores.softcap)
    library = functional.scaled_dot_product_attention
    return library if scores.scale is None else partial(library, scale=scores.scale)


def _mix_capped(
    queries_BKQE: Tensor,
    keys_BKNE: Tensor,
    values_BKNE: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    softcap: float,
) -> Tensor:
    factor = queries_BKQE.shape[-1] ** -0.5 if scale is None else scale
    products_BKQN = (queries_BKQE @ keys_BKNE.transpose(-1, -2)).float() * factor
    scores_BKQN = soft_capped(products_BKQN, softcap)
    if mask is not None:
        scores_BKQN = scores_BKQN + mask
    return scores_BKQN.softmax(-1).to(values_BKNE.dtype) @ values_BKNE


_TWINS = 5
"""Tokens per branch in the self-check."""

_SHORT = 300
_LONG = (1_100, 4_200, 16_500)
"""Text lengths in the self-check, in positions."""
_BEGINNINGS = 6
_BEGINNING = 48
"""Number of short texts of which each of the first rows is checked, and how many rows: libraries
have more routines for few keys, and two routines differ in some rows only."""


class LayerPages:
    """Keys and values of one layer, indexed by slot, and attention over them.

    Initialized to zero: a masked slot that was never written is finite and adds exactly zero.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_kv_heads: int,
        queries_per_kv: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scores: Scores = PLAIN_SCORES,
    ) -> None:
        self._mix = mix_of(scores)
        self._num_kv_heads = num_kv_heads
        self._queries_per_kv = queries_per_kv
        self._num_queries = num_kv_heads * queries_per_kv
        self._head_dim = head_dim
        shape = (num_slots, 2 * num_kv_heads, head_dim)
        self._slots_SHE = torch.zeros(shape, dtype=dtype, device=device)
        by_head = self._slots_SHE.transpose(0, 1).unsqueeze(0)
        self._keys_1KSE = by_head.narrow(1, 0, num_kv_heads)
        self._values_1KSE = by_head.narrow(1, num_kv_heads, num_kv_heads)

    def attend(self, rows: RowPlan, groups: Sequence[AttentionGroup], heads_THE: Tensor) -> Tensor:
        """Writes the rows' keys and values, then attends every row to its keys; [T, G * K * E]."""
        self._write(rows, heads_THE)
        queries_1KQE = self._queries(heads_THE)
        num_rows = heads_THE.shape[0]
        if len(groups) == 1 and groups[0].window_rows == num_rows and groups[0].rows is None:
            keys, values = self._read(groups[0])
            mixed_1KQE = self._mix(queries_1KQE, keys, values, groups[0].mask)
            return mixed_1KQE.transpose(1, 2).reshape(num_rows, -1)
        mixed_TD = heads_THE.new_zeros(num_rows, self._num_queries * self._head_dim)
        for group in groups:
            if group.rows is not None:
                gathered_1KQE = self._queries(heads_THE.index_select(0, group.rows))
                wanted_RD = self._mixed(group, gathered_1KQE)[: group.num_rows]
                mixed_TD.index_copy_(0, group.rows[: group.num_rows], wanted_RD)
                continue
            wanted_RD = self._attend_in_group(group, queries_1KQE)
            mixed_TD.narrow(0, group.first_row, group.num_rows).copy_(wanted_RD)
        return mixed_TD

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        """Copies keys and values between slots; reads all sources before it writes any target."""
        self._slots_SHE.index_copy_(0, targets_M, self._slots_SHE.index_select(0, sources_M))

    def clear(self) -> None:
        """Resets all slots to zero: an aborted round may have left values that are not finite."""
        self._slots_SHE.zero_()

    @property
    def slot_bytes(self) -> int:
        return self._slots_SHE[0].nbytes

    def read(self, slots_S: Tensor) -> Tensor:
        """Returns a copy of the slots' contents, as bytes on their device."""
        return self._slots_SHE.index_select(0, slots_S).view(-1).view(torch.uint8)

    def write(self, slots_S: Tensor, content_B: Tensor) -> None:
        """Writes bytes from `read` to slots that no round reads or writes."""
        content_SHE = content_B.to(self._slots_SHE.device).view(self._slots_SHE.dtype)
        self._slots_SHE.index_copy_(0, slots_S, content_SHE.view(-1, *self._slots_SHE.shape[1:]))

    def _queries(self, heads_THE: Tensor) -> Tensor:
        return (
            heads_THE.narrow(1, 0, self._num_queries)
            .reshape(1, -1, self._num_kv_heads, self._head_dim)
            .transpose(1, 2)
        )

    def _attend_in_group(self, group: AttentionGroup, queries_1KQE: Tensor) -> Tensor:
        per_kv = self._queries_per_kv
        window_1KQE = queries_1KQE.narrow(
            2, group.window_start * per_kv, group.window_rows * per_kv
        )
        window_WD = self._mixed(group, window_1KQE)
        return window_WD.narrow(0, group.first_row - group.window_start, group.num_rows)

    def _mixed(self, group: AttentionGroup, window_1KQE: Tensor) -> Tensor:
        keys, values = self._read(group)
        mixed_1KQE = self._mix(window_1KQE, keys, values, group.mask)
        return mixed_1KQE.transpose(1, 2).reshape(group.window_rows, -1)

    def _write(self, rows: RowPlan, heads_THE: Tensor) -> None:
        """Writes the keys and values of all rows but padding."""
        keys_values_RHE = heads_THE[: rows.num_rows, self._num_queries :]
        if rows.slots_are_consecutive:
            slots_RHE = self._slots_SHE.narrow(0, rows.first_slot, rows.num_rows)
            slots_RHE.copy_(keys_values_RHE)
        else:
            self._slots_SHE.index_copy_(0, rows.slots_R, keys_values_RHE)

    def _read(self, group: AttentionGroup) -> tuple[Tensor, Tensor]:
        """Returns keys and values [1, K, N, E]; a view where the pages are contiguous."""
        if group.slots is None:
            first, num_keys = group.first_slot, group.num_keys
            return (
                self._keys_1KSE.narrow(2, first, num_keys),
                self._values_1KSE.narrow(2, first, num_keys),
            )
        num_kv = self._num_kv_heads
        gathered_NHE = self._slots_SHE.index_select(0, group.slots)
        gathered_1HNE = gathered_NHE.transpose(0, 1).unsqueeze(0)
        return gathered_1HNE.narrow(1, 0, num_kv), gathered_1HNE.narrow(1, num_kv, num_kv)


def attend_whole(
    heads_THE: Tensor,
    *,
    num_sequences: int,
    num_kv_heads: int,
    window: int | None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Computes causal attention within `num_sequences` equally long sequences, without a cache."""
    num_rows, num_heads, head_dim = heads_THE.shape
    queries_per_kv = num_heads // num_kv_heads - 2
    shape_BLGKE = (num_sequences, num_rows // num_sequences, -1, num_kv_heads, head_dim)
    heads_BGKLE = heads_THE.view(shape_BLGKE).permute(0, 2, 3, 1, 4)
    queries_BHLE = heads_BGKLE[:, :queries_per_kv].flatten(1, 2)
    keys_BHLE, values_BHLE = (
        heads_BGKLE[:, at].repeat(1, queries_per_kv, 1, 1)
        for at in (queries_per_kv, queries_per_kv + 1)
    )
    if window is None and scores.softcap is None:
        mixed_BHLE = functional.scaled_dot_product_attention(
            queries_BHLE, keys_BHLE, values_BHLE, is_causal=True, scale=scores.scale
        )
    else:
        length = shape_BLGKE[1]
        mask_LL = _causal_mask(length, window or length, like=heads_THE)
        mixed_BHLE = mix_of(scores)(queries_BHLE, keys_BHLE, values_BHLE, mask_LL)
    return mixed_BHLE.transpose(1, 2).reshape(num_rows, -1)


def _causal_mask(length: int, window: int, *, like: Tensor) -> Tensor:
    at_L = torch.arange(length, device=like.device)
    distance_LL = at_L[:, None] - at_L[None, :]
    is_hidden_LL = (distance_LL < 0) | (distance_LL >= window)
    return like.new_zeros(length, length).masked_fill_(is_hidden_LL, -torch.inf)


@cache
def grouping_is_exact(
    *,
    num_kv_heads: int,
    queries_per_kv: int,
    head_dim: int,
    page_size: int,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    row_by_row: bool = False,
    scores: Scores = PLAIN_SCORES,
) -> bool:
    """Returns whether, on this machine, rows that attend together get the same bits as alone.
    `row_by_row` checks the calls of that mode instead of the grouped ones.

    Checks short texts and the ends of long ones, up to `longest` positions: a kernel may split many
    keys into parts by the number of rows. Returns False for grouped soft caps on a CPU, where plain
    operations may compute the end of a range with another routine: rows attend one by one.
    """
    if scores.softcap is not None and device.type == "cpu" and not row_by_row:
        return False
    question = {
        "check": "attention grouping 3",
        "heads": [num_kv_heads, queries_per_kv, head_dim],
        "page_size": page_size,
        "texts": _checked_texts(longest, page_size=page_size),
        "dtype": str(dtype),
        "threads": num_threads,
        "row_by_row": row_by_row,
        "scores": [scores.scale, scores.softcap],
    }

    def ask() -> bool:
        return all(
            _GroupingCheck(
                num_kv_heads=num_kv_heads,
                queries_per_kv=queries_per_kv,
                head_dim=head_dim,
                page_size=page_size,
                length=length,
                seed=seed,
                dtype=dtype,
                device=device,
                row_by_row=row_by_row,
                scores=scores,
            ).holds()
            for length, seed in _checked_texts(longest, page_size=page_size)
        )

    holds = kept(question, ask, device=device)
    if not holds:
        logger.warning(
            "attention_self_check_failed kv_heads=%d queries_per_kv=%d head_dim=%d row_by_row=%s",
            num_kv_heads,
            queries_per_kv,
            head_dim,
            row_by_row,
        )
    return holds


def _checked_texts(longest: int, *, page_size: int) -> list[tuple[int, int]]:
    """Returns (length, seed) of each text, the length a multiple of the page size: always the short
    texts, and longer ones up to `longest` positions."""
    beginning, short = (
        max(3, -(-length // page_size)) * page_size for length in (_BEGINNING, _SHORT)
    )
    long = (min(length, longest) // page_size * page_size for length in _LONG)
    beginnings = [(beginning, 1 + at) for at in range(_BEGINNINGS)]
    lengths = [short, *sorted({length for length in long if length > short})]
    return [*beginnings, *((length, 0) for length in lengths)]


def _tables(num_pages: int, *, everywhere: bool) -> list[Sequence[int]]:
    """Returns page tables of one text: contiguous, and with `everywhere` also shifted and
    scattered."""
    first = range(num_pages)
    if not everywhere:
        return [first]
    further_on = range(num_pages + 1, 2 * num_pages + 1)
    scattered = [2 * num_pages + 2 * (num_pages - at) for at in range(num_pages)]
    return [first, further_on, scattered]


class _GroupingCheck:
    """Compares the rows at the end of a random text, alone and in groups of different sizes."""

    def __init__(
        self,
        *,
        num_kv_heads: int,
        queries_per_kv: int,
        head_dim: int,
        page_size: int,
        length: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        row_by_row: bool,
        scores: Scores,
    ) -> None:
        self._kind = AttentionKind(
            queries_per_kv=queries_per_kv, window=None, dtype=dtype, row_by_row=row_by_row
        )
        self._page_size = page_size
        self._length = length
        self._seed = seed
        self._device = device
        num_queries = queries_per_kv * num_kv_heads
        generator = torch.Generator().manual_seed(20240603 + seed)
        self._tables = _tables(length // page_size, everywhere=seed > 0)
        self._pages = LayerPages(
            num_slots=(1 + max(map(max, self._tables))) * page_size,
            num_kv_heads=num_kv_heads,
            queries_per_kv=queries_per_kv,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            scores=scores,
        )
        # All rows of a short text, or the last rows of a long one.
        num_rows = length if length <= 2 * _SHORT else 2 * page_size + 3
        self._first = length - num_rows
        shape = (length, 2 * num_kv_heads, head_dim)
        keys_values_SHE = torch.randn(shape, generator=generator).to(device, dtype)
        within_P = torch.arange(page_size)
        for table in self._tables:
            slots_S = (torch.tensor(table)[:, None] * page_size + within_P).view(-1).to(device)
            self._pages.write(slots_S, keys_values_SHE.reshape(-1).view(torch.uint8))
        queries_RHE = torch.randn(num_rows, num_queries, head_dim, generator=generator)
        self._heads_RHE = torch.cat(
            [queries_RHE.to(device, dtype), keys_values_SHE[self._first :]], dim=1
        )

    def holds(self) -> bool:
        first, page_size = self._first, self._page_size
        num_rows = self._length - first
        together_RD = self._mixed(first, num_rows)
        stride = max(1, math.isqrt(num_rows) - 1)
        singles = {*range(0, num_rows, stride), page_size - 1, page_size, num_rows - 1}
        if first == 0:
            singles |= set(range(min(num_rows, _BEGINNING)))
        if any(
            not torch.equal(self._mixed(first + at, 1)[0], together_RD[at])
            for at in sorted(singles)
        ):
            return False
        block = QUERY_BLOCK // self._kind.queries_per_kv
        for at in (0, max(0, page_size - 2), num_rows - 2 * page_size - 3):
            for count in (2, 3, 5, 8, block + 1, page_size + 2):
                if at + count > num_rows:
                    continue
                if not torch.equal(self._mixed(first + at, count), together_RD[at : at + count]):
                    return False
        # Done last, and from the end backwards: branches overwrite the slots after their first one.
        return all(
            torch.equal(
                self._mixed_tree(first + at),
                together_RD[at : at + _TWINS].repeat_interleave(2, dim=0),
            )
            for at in (page_size, max(1, page_size - 2))
            if at + 2 * _TWINS <= num_rows
        )

    def _mixed(self, start: int, num_rows: int) -> Tensor:
        # Across the texts, every row is computed with every page table.
        table = self._tables[(start + num_rows + self._seed) % len(self._tables)]
        segment = RowSegment(start, num_rows, table)
        return self._attend(segment, self._heads_RHE[start - self._first :][:num_rows])

    def _mixed_tree(self, start: int) -> Tensor:
        """Attends the rows from `start` on as two equal branches with interleaved tokens."""
        parents = (-1, -1, *range(2 * _TWINS - 2))
        segment = RowSegment(start, 2 * _TWINS, self._tables[0], parents)
        heads_RHE = self._heads_RHE[start - self._first :][:_TWINS]
        return self._attend(segment, heads_RHE.repeat_interleave(2, dim=0))

    def _attend(self, segment: RowSegment, heads_RHE: Tensor) -> Tensor:
        rows = RowPlan.build(
            [segment], page_size=self._page_size, device=self._device, numerics="invariant"
        )
        padded_THE = heads_RHE.new_zeros(rows.num_padded, *heads_RHE.shape[1:])
        padded_THE[: len(heads_RHE)] = heads_RHE
        return self._pages.attend(rows, rows.groups(self._kind), padded_THE)[: len(heads_RHE)]
