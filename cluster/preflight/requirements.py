"""Requirements of a node, with the defaults of the command's options. Imports nothing heavy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.topology import AuthMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements of one node."""

    num_cpus: int = 1
    num_gpus: int = 0
    shm_bytes: int = 2 * 2**30
    """Ray's object store and NCCL's shared-memory transport both use /dev/shm."""
    disk_free_bytes: int = 5 * 2**30
    """Ray's logs and spilled objects, and the cache of compiled kernels."""
    open_files: int = 65_536
    auth_mode: "AuthMode | None" = None
    """None accepts any explicit choice."""
    spans_nodes: bool = False
    """True if ranks on other machines must reach this one."""
    interface: str | None = None
    """The interface that ranks use; None: the one of the node's address."""
