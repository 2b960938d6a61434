"""Compiling with Numba, and keeping what was compiled on disk.

A kernel takes seconds to compile and a tenth of one to load. Numba keeps it for the processor, the
version of Python and the path that it was compiled for; the folder's name is a digest of the last
two and of the sources, because Numba looks at the file of the kernel only.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from eesd_dist.user_folders import cache_folder

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])


@cache
def can_compile() -> bool:
    return find_spec("numba") is not None


def kernels_folder() -> Path:
    """Returns the folder of kept kernels; it need not exist or be writable."""
    return cache_folder() / "kernels"


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


def kernel(function: Callable[..., None], *modules: ModuleType) -> Callable[..., None]:
    """Returns the function, compiled at its first call or loaded from the cache on disk. Calls
    release the GIL. `modules`: those of what it calls outside of its own folder; of a package, all
    of its files."""
    import numba

    folder = _folder(function, modules)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Numba reads the setting when a function is decorated.
        numba.config.CACHE_DIR = str(folder)
        compiled: Callable[..., None] = numba.njit(nogil=True, error_model="numpy", cache=True)(
            function
        )
    except (OSError, RuntimeError) as error:
        logger.info("kernel not kept: folder=%s reason=%s", folder, error)
        return inner(function)
    return compiled


def is_kept(function: Callable[..., None], *modules: ModuleType) -> bool:
    """Returns whether an earlier process has kept this kernel, for some types of arguments."""
    return any(_folder(function, modules).rglob("*.nbi"))


def _folder(function: Callable[..., None], modules: tuple[ModuleType, ...]) -> Path:
    return kernels_folder() / _digest(function, modules)[:16]


def _digest(function: Callable[..., None], modules: tuple[ModuleType, ...]) -> str:
    own = inspect.getfile(function)
    files = sorted(Path(own).parent.glob("*.py"))
    for module in modules:
        file = Path(inspect.getfile(module))
        files += sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]
    digest = sha256(f"{own} {sys.implementation.cache_tag}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
