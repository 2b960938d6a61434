"""Chooses the routine that multiplies by a weight matrix.

A candidate packs a weight once and then multiplies rows by it. With `numerics: invariant` a row of
a product must have the same bits for any number of rows in the call. A kernel of our own may have
them by construction. A library's product is taken only after a self-check on the actual shape, for
row counts as `padded_rows` rounds them. `fast` takes the first candidate unchecked and does not
pad. Which candidates there are, and in which order, is said by the device's backend. Does not
depend on layers or requests.

The order is fixed by the machine's capability and never by measured times, so that two processes on
equal machines make the same choice.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.config import DType, Numerics
from eesd_dist.devices import backend_of
from eesd_dist.errors import ConfigError
from eesd_dist.model.answers import cached_answer
from eesd_dist.model.slow_kernels import note_slow_kernel

logger = logging.getLogger(__name__)

# Shapes: M rows, I channels in, O channels out.
Linear = Callable[[Tensor], Tensor]
"""x_MI -> y_MO."""

Pack = Callable[[Tensor, Tensor | None], Linear]
"""weight_OI, bias_O -> the product with them."""

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_CHECKED_ROWS = (*range(1, 41), 64, 96, 129, 254, 300, 384, 448, 500, 521, 640, 801)
"""Row counts of the self-check, up to a prefill chunk plus a full batch of drafts."""
_CHECKED_ALONE = 24
"""Number of checked calls with the smallest row count."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ProductBackend(Protocol):
    """Part of a backend that products use."""

    def candidates(
        self, dtype: DType, numerics: Numerics
    ) -> tuple[Sequence["Candidate"], torch.dtype]:
        """Returns the ways to multiply by weights of a type, the first one preferred, and the type
        of what is between products. Raises ConfigError if the machine has none."""
        ...

    def padded_rows(self, num_rows: int) -> int:
        """Returns the row count that a library's product is called with to have the bits that a row
        has in other counts."""
        ...


def _products_on(device: torch.device) -> ProductBackend:
    backend: ProductBackend = backend_of(device).model
    return backend


def padded_rows(num_rows: int, *, numerics: Numerics, device: torch.device) -> int:
    """Returns the row count at which products are computed: the next one the self-check covers."""
    return num_rows if numerics == "fast" else _products_on(device).padded_rows(num_rows)


def pad_rows(x_MI: Tensor, num_rows: int) -> Tensor:
    """Appends rows of zeros to x, up to `num_rows`."""
    missing = num_rows - x_MI.shape[0]
    return functional.pad(x_MI, (0, 0, 0, missing)) if missing else x_MI


def plain_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Returns torch's product, which autograd supports."""
    return lambda x_MI: functional.linear(x_MI, weight_OI, bias_O)


def in_row_tiles(pack: Pack, *, tile_rows: int) -> Pack:
    """Computes the product in tiles of `tile_rows` rows: every library call has the same shape, so
    that no decision by the row count affects a row. Slow for many rows."""

    def pack_tiled(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        product = pack(weight_OI, bias_O)

        def multiply(x_MI: Tensor) -> Tensor:
            num_rows = x_MI.shape[0]
            if num_rows == tile_rows:
                return product(x_MI)
            padded_MI = pad_rows(x_MI, -(-num_rows // tile_rows) * tile_rows)
            tiles_MI = padded_MI.view(-1, tile_rows, padded_MI.shape[-1]).unbind()
            return torch.cat([product(tile_MI) for tile_MI in tiles_MI])[:num_rows]

        return multiply

    return pack_tiled


@dataclass(frozen=True, slots=True)
class Candidate:
    """Way to multiply by a weight matrix."""

    name: str
    pack: Pack
    is_independent: bool = False
    """True if rows are independent by construction, for any row count: not checked, not padded."""
    has_few_tilings: bool = False
    """True if the checked row counts have every tiling: longer runs need not be split."""


class LinearPacker:
    """Turns weight matrices into products for one device, weight type and numerics."""

    def __init__(self, *, dtype: DType, numerics: Numerics, device: torch.device) -> None:
        self._numerics: Numerics = numerics
        self.device = device
        self.weight_dtype = TORCH_DTYPES[dtype]
        products = _products_on(device)
        self.candidates, self.compute_dtype = products.candidates(dtype, numerics)
        self._dtype = dtype
        self.products = self.candidates[0].name if numerics == "invariant" else ""
        """Decides the last bits, of one machine as of another; `fast` makes no such promise."""
        self._num_matrices: Counter[str] = Counter()

    def pack(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """Packs with the first candidate that computes rows independently of one another."""
        weight_OI = weight_OI.to(device=self.device, dtype=self.weight_dtype)
        bias_O = None if bias_O is None else bias_O.to(self.device, self.weight_dtype)
        for candidate in self.candidates:
            if self._keeps_promise(candidate, weight_OI):
                self._num_matrices[candidate.name] += 1
                product = candidate.pack(weight_OI, bias_O)
                is_whole = candidate.is_independent or candidate.has_few_tilings
                if self._numerics == "fast" or is_whole:
                    return product
                return _in_checked_runs(product, device=self.device)
        names = ", ".join(candidate.name for candidate in self.candidates)
        raise ConfigError(
            f"no product with a {tuple(weight_OI.shape)} matrix computes rows independently "
            f"of other rows on this machine (tried: {names}): set model.numerics to fast, "
            "and read the mismatch rate of `eesd bench exact`"
        )

    def report(self, what: str) -> None:
        """Logs which products are used."""
        logger.info(
            "weights packed: %s dtype=%s computed_in=%s products=%s",
            what,
            self._dtype,
            str(self.compute_dtype).removeprefix("torch."),
            ",".join(
                f"{name.replace(' ', '-')}:{count}" for name, count in self._num_matrices.items()
            )
            or "none",
        )

    def _keeps_promise(self, candidate: Candidate, weight_OI: Tensor) -> bool:
        if self._numerics == "fast" or candidate.is_independent:
            return True
        return rows_are_independent(
            candidate,
            num_out=weight_OI.shape[0],
            num_in=weight_OI.shape[1],
            dtype=self.compute_dtype,
            device=self.device,
            num_threads=torch.get_num_threads(),
        )


def _in_checked_runs(product: Linear, *, device: torch.device) -> Linear:
    """Splits more rows than the self-check covers into runs that it covers."""
    longest = padded_rows(_CHECKED_ROWS[-1], numerics="invariant", device=device)

    def multiply(x_MI: Tensor) -> Tensor:
        num_rows = x_MI.shape[0]
        if num_rows <= longest:
            return product(x_MI)
        runs = []
        for first in range(0, num_rows, longest):
            run_MI = x_MI[first : first + longest]
            count = padded_rows(len(run_MI), numerics="invariant", device=device)
            runs.append(product(pad_rows(run_MI, count))[: len(run_MI)])
        return torch.cat(runs)

    return multiply


@cache
def rows_are_independent(
    candidate: Candidate,
    *,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
) -> bool:
    """Returns whether a row of the product has the same bits for any number of rows in the call.

    Checks the whole matrix: the library may treat a slice of its output channels differently.
    """
    question = {
        "check": "linear rows 3",
        "rows": list(_CHECKED_ROWS),
        "candidate": candidate.name,
        "shape": [num_out, num_in],
        "dtype": str(dtype),
        "threads": num_threads,
    }
    agrees = cached_answer(
        question,
        lambda: _rows_agree(candidate, num_out, num_in, dtype=dtype, device=device),
        device=device,
    )
    if not agrees:
        logger.warning(
            "linear_self_check_failed candidate=%s out=%d in=%d threads=%d",
            candidate.name,
            num_out,
            num_in,
            num_threads,
        )
        note_slow_kernel(f"products with {num_out} x {num_in} without {candidate.name}")
    return agrees


def _rows_agree(
    candidate: Candidate, num_out: int, num_in: int, *, dtype: torch.dtype, device: torch.device
) -> bool:
    def count(num_rows: int) -> int:
        return padded_rows(num_rows, numerics="invariant", device=device)

    generator = torch.Generator(device).manual_seed(20240603)
    weight_OI = torch.randn(
        num_out, num_in, generator=generator, device=device, dtype=torch.bfloat16
    ).mul_(0.02)
    product = candidate.pack(weight_OI.to(dtype), None)
    del weight_OI
    counts = sorted({count(num_rows) for num_rows in _CHECKED_ROWS})
    x_MI = torch.randn(counts[-1], num_in, generator=generator, device=device).to(dtype)
    batch_MO = product(x_MI)
    if any(not torch.equal(product(x_MI[:rows]), batch_MO[:rows]) for rows in counts[:-1]):
        return False
    step = count(1)
    # The stride is one more than the rows of a call, so that rows move to other places in the call.
    return all(
        torch.equal(product(x_MI[at : at + step]), batch_MO[at : at + step])
        for at in range(0, _CHECKED_ALONE * (step + 1), step + 1)
    )
