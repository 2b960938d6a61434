"""Starts `eesd` on a module path where nothing of the user comes before what is installed.

A folder of PYTHONPATH stands before the standard library, and the working directory is on the path
of every `python -m`: a `cluster.py` or `random.py` there would be imported instead of our package
or Python's. The path is put in order before the first import that could be shadowed, here and, by
the environment, in all processes that are started from here. Nothing but `os` and `sys`, which the
interpreter has loaded already, is imported for it; the module stands alone, since the packages are
among what can be shadowed.
"""

import os
import sys
from collections.abc import Sequence

_LIBRARY = os.path.dirname(os.__file__)
"""Folder of the standard library."""


def main() -> int:
    """Runs the command line of `eesd`."""
    in_order()
    from serve_app.cli.main import main

    return main()


def in_order() -> None:
    """Puts the module path of this process, and of those that it starts, in order."""
    os.environ["PYTHONSAFEPATH"] = "1"
    # The first entry is the folder of the script, or the working directory.
    entries = sys.path if sys.flags.safe_path else sys.path[1:]
    named = os.environ.get("PYTHONPATH", "")
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = ordered(entries, named=named.split(os.pathsep) if named else [], own=own)
    if named:
        # The interpreter puts these entries first, in this order, and leaves out repeated ones.
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)


def ordered(entries: Sequence[str], *, named: Sequence[str], own: str) -> list[str]:
    """Returns the standard library, our packages, what is installed, and then what PYTHONPATH
    names. `own` is the folder of our packages, which may be any of the last two, or neither in an
    editable installation. An empty name is the working directory, and is left out.
    """
    users = [os.path.abspath(name) for name in named if name]
    from_users = {*users, *([os.getcwd()] if "" in named else [])}
    library = [entry for entry in entries if _is_library(entry)]
    installed = [entry for entry in entries if entry not in from_users]
    return list(dict.fromkeys([*library, own, *installed, *users]))


def _is_library(entry: str) -> bool:
    is_archive = entry.endswith(".zip") and os.path.dirname(entry) == os.path.dirname(_LIBRARY)
    return is_archive or entry in (_LIBRARY, os.path.join(_LIBRARY, "lib-dynload"))


if __name__ == "__main__":
    sys.exit(main())
