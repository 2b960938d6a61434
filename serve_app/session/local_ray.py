"""A Ray instance that starts and ends with the service, or a connection to a running cluster.

The local instance is small (no dashboard, little shared memory). It requires a token that only its
processes have, and its folder is removed in the end. The environment it needs is set by
`serve_app.session.environment`.
"""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from eesd_dist.errors import ConfigError, EngineError
from serve_app.config import ServiceConfig
from serve_app.session.connection_file import is_silent
from serve_app.session.processes import descendants, end, running_after

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100 * 2**20
_LONGEST_FOLDER = 40
"""Characters. Ray creates sockets deep below its folder, with paths of at most 107 characters."""
_SETTLE_S = 5.0


@contextmanager
def local_ray(config: ServiceConfig, *, shows_logs: bool, min_cpus: int = 1) -> Iterator[None]:
    """Within the block Ray runs here; after it no process, session or file of it is left."""
    folder = tempfile.mkdtemp(prefix="eesd-", dir=_short_folder())
    try:
        _start(folder, num_cpus=max(_num_cpus(config), min_cpus), shows_logs=shows_logs)
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


@contextmanager
def connected_ray(address: str, *, shows_logs: bool) -> Iterator[None]:
    """Within the block this process is connected to an existing cluster."""
    if is_silent(address):
        raise ConfigError(
            f"no Ray cluster at {address}: nothing accepts connections there: check --address, "
            "and whether Ray runs"
        )
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=shows_logs)
    except (ConnectionError, ValueError, RayError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"no Ray cluster at {address}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _start(folder: str, *, num_cpus: int, shows_logs: bool) -> None:
    try:
        ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=shows_logs,
            _temp_dir=folder,
        )
    except Exception as error:  # Ray raises many classes, without a common base
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EngineError(f"Ray could not be started: {reason}") from error


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_FOLDER else "/tmp"


def _num_cpus(config: ServiceConfig) -> int:
    """Returns logical CPUs: as many as the placement asks for, however small the machine is."""
    placement = config.placement
    parallel = config.engine.parallel
    per_pipeline = (
        parallel.draft_tensor_parallel_size * placement.draft.num_cpus
        + parallel.verify_tensor_parallel_size * placement.verify.num_cpus
    )
    wanted = math.ceil(per_pipeline * config.pipelines.max_count)
    return max(os.cpu_count() or 1, wanted)
