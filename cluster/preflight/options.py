"""Options of `eesd preflight`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """Checks what this node lacks, before it joins a cluster.

    The exit status is 1 if the service would not start, else 0, also with warnings.
    """

    cluster_file: Annotated[Path | None, "the `ray up` file of the node's cluster"] = None
    cpus: Annotated[int, "CPUs required"] = 1
    gpus: Annotated[int, "GPUs required"] = 0
    shm_gib: Annotated[float, "size of /dev/shm, GiB"] = 2.0
    open_files: Annotated[int, "limit of open files"] = 65_536
    spans_nodes: Annotated[bool, "ranks run on other nodes too"] = False
