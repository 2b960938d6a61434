"""Compiling with Numba, and keeping what was compiled on disk.

A kernel takes seconds to compile and a tenth of one to load. Numba keeps it for the processor that
it was compiled for; the folder's name is a digest of the sources, because Numba looks at the file
of the kernel only.
"""

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numba

from eesd_dist.model import kv_layout
from eesd_dist.model.answers import cache_folder

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


def inner(function: F) -> F:
    """Compiles a part of a kernel; it becomes part of its callers."""
    compiled: F = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function, compiled at its first call or loaded from the cache on disk. Calls
    release the GIL."""
    folder = cache_folder() / "kernels" / _digest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Numba reads the setting when a function is decorated.
        numba.config.CACHE_DIR = str(folder)
        kept: Callable[..., None] = numba.njit(nogil=True, error_model="numpy", cache=True)(
            function
        )
    except (OSError, RuntimeError) as error:
        logger.info("kernel not kept: folder=%s reason=%s", folder, error)
        return inner(function)
    return kept


def _digest() -> str:
    sources = (Path(kv_layout.__file__), *sorted(Path(__file__).parent.glob("*.py")))
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
