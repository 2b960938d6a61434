"""Compiling with Numba, and keeping what was compiled on disk.

A kernel takes seconds to compile and a tenth of one to load. Numba keeps it for the processor that
it was compiled for; the folder's name is a digest of the sources, because Numba looks at the file
of the kernel only.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])

FOLDER_VARIABLE = "EESD_CACHE_DIR"


@cache
def can_compile() -> bool:
    return find_spec("numba") is not None


def cache_folder() -> Path:
    """Returns the folder of what a start-up may reuse; it need not exist or be writable."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "eesd"


def inner(function: F) -> F:
    """Compiles a part of a kernel; it becomes part of its callers."""
    import numba

    compiled: F = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def use_in_kernels(functions: Iterable[Callable[..., object]]) -> None:
    """Lets kernels call functions of numbers, compiled; Python calls them as they are."""
    from numba.extending import register_jitable

    for function in functions:
        register_jitable(error_model="numpy")(function)


def kernel(function: Callable[..., None], *parts: ModuleType) -> Callable[..., None]:
    """Returns the function, compiled at its first call or loaded from the cache on disk. Calls
    release the GIL. `parts`: the modules of what it calls, other than its own; of a package, all of
    its files."""
    import numba

    folder = cache_folder() / "kernels" / _digest(function, parts)[:16]
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


def _digest(function: Callable[..., None], parts: tuple[ModuleType, ...]) -> str:
    files = [Path(inspect.getfile(function))]
    for part in parts:
        file = Path(inspect.getfile(part))
        files += sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
