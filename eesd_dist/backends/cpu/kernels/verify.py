"""Compiled call for a verify pass: layers, LM head and the choice of every sampled row.

Rows are those of `run_layers` and `LogitsHead`, choices those of `rule.choose`, bit for bit.

Every thread of a call runs this function, as `run_layers`.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from eesd_dist.backends.cpu.compiled import is_kept, kernel
from eesd_dist.backends.cpu.kernels.choosing import Choices, Masks, Memory, choose_tokens
from eesd_dist.backends.cpu.kernels.layers import LayersCall, layers_kernel
from eesd_dist.backends.cpu.kernels.products import Kind, LmHead, thread_range
from eesd_dist.backends.cpu.kernels.sources import Source, copy_rows
from eesd_dist.backends.cpu.kernels.threads import wait
from eesd_dist.model import kv_layout
from eesd_dist.model.kv_layout import Ints, RowArrays
from eesd_dist.sampling import row_filters
from eesd_dist.transport import sum_layout

_PARTS = (kv_layout, sum_layout, row_filters)
_run_layers = layers_kernel()


def verify_rows(
    kind: Kind,
    layers: LayersCall,
    lm_head: LmHead,
    ids_V: Ints,
    memory: Memory,
    rows: RowArrays,
    source: Source,
    choices: Choices,
    masks_MU: Masks,
    counters: npt.NDArray[np.int64],
    thread: int,
    num_threads: int,
) -> None:
    """Runs the rows and fills `choices.tokens_S`; may overwrite `rows`."""
    num_rows = len(rows.position_R)
    if num_rows == 0:
        return
    # Not constants, for which Numba would compile the layers once more.
    never, always = num_rows < 0, num_rows >= 0
    scratch = layers.scratch
    first_row, end_row = thread_range(num_rows, thread, num_threads)
    copy_rows(source, scratch.x, scratch.x_bytes, layers.widths.hidden, first_row, end_row)
    wait(counters, num_threads)
    _run_layers(
        kind,
        layers.geometry,
        layers.widths,
        layers.norms,
        scratch,
        layers.table,
        layers.sums,
        rows,
        np.int64(0),
        2 * len(layers.table),
        never,
        always,
        choices.rows_S,
        len(choices.rows_S),
        counters,
        thread,
        num_threads,
    )
    wait(counters, num_threads)
    choose_tokens(
        kind,
        lm_head,
        ids_V,
        memory,
        scratch,
        layers.sums,
        choices,
        masks_MU,
        len(choices.rows_S),
        counters,
        thread,
        num_threads,
    )


@cache
def verify_kernel() -> Callable[..., None]:
    return kernel(verify_rows, *_PARTS)


def is_verify_cached() -> bool:
    """Returns whether the kernel need not be compiled."""
    return is_kept(verify_rows, *_PARTS)
