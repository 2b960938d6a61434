"""A Ray instance that comes with the service and goes with it.

Small (no dashboard, little shared memory), reachable with a token that only its own processes have,
in a folder of its own that is removed in the end. Nothing of it outlives the block.
"""

import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from serve_app._processes import descendants, end, running_after
from serve_app.config import ServiceConfig

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100 * 2**20
_LONGEST_FOLDER = 40
"""Ray puts sockets deep below its folder, and their paths may have 107 characters."""
_SETTLE_S = 5.0


@contextmanager
def local_ray(config: ServiceConfig) -> Iterator[None]:
    """Within the block Ray runs here; after it there is no process, session or file of it."""
    folder = tempfile.mkdtemp(prefix="eesd-", dir=_short_folder())
    _set_environment()
    try:
        ray.init(
            "local",
            num_cpus=_num_cpus(config),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=True,
            _temp_dir=folder,
        )
        yield
    finally:
        ours = descendants()
        ray.shutdown()
        left = running_after(ours, wait_s=_SETTLE_S)
        if left:
            logger.warning("ended what Ray left behind: processes=%d", len(left))
            end(left)
            running_after(left, wait_s=_SETTLE_S)
        shutil.rmtree(folder, ignore_errors=True)


def _set_environment() -> None:
    """Before Ray is started; all its processes inherit it."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A service whose actors are known from the start has no use for idle workers in store.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_metrics_collection": "0",
        }
    )


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_FOLDER else "/tmp"


def _num_cpus(config: ServiceConfig) -> int:
    """Logical ones: as many as the placement asks for, on however small a machine."""
    placement = config.placement
    ranks = config.engine.parallel.verify_tensor_parallel_size
    per_pipeline = placement.draft.num_cpus + ranks * placement.verify.num_cpus
    wanted = math.ceil(per_pipeline * config.pipelines.max_count)
    return max(os.cpu_count() or 1, wanted)
