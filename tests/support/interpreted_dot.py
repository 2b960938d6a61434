"""Products in Triton's interpreter that do not depend on the machine's BLAS.

The interpreter multiplies with NumPy. Where OpenBLAS takes its kernels for AVX2, the bits of a row
depend on the number of rows and on its place among them, which no GPU's product does: tests that
compare bits would fail on such machines alone.
"""

from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def install() -> None:
    """Replaces the interpreter's product by one that calls no BLAS."""
    InterpreterBuilder.create_dot = _create_dot


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, imprecise: Any) -> Any:
    left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    product = np.einsum("...mk,...kn->...mn", left, right, optimize=False)
    return TensorHandle(product + d.data, d.dtype.scalar)
