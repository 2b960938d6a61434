"""A Ray instance that starts and ends with the service, or a connection to a running cluster.

The local instance is small (no dashboard, little shared memory). It requires a token that only its
processes have, its folder is private, and a watchdog ends it and removes the folder. The
environment it needs is set by `serve_app.service.environment`.
"""

import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import ray

from cluster.ray_compat import job_with_installed_code
from eesd_dist.errors import ConfigError, EngineError
from eesd_dist.user_folders import user_folder
from eesd_dist.workers.crash_report import require_room
from serve_app.config import ServiceConfig
from serve_app.service.connection_file import connection_file_for, is_silent
from serve_app.service.environment import prepare_for_haproxy, uses_haproxy
from serve_app.service.ray_failures import reason_of
from serve_app.service.watchdog import RAY_LOGS, Watchdog, haproxy_folder, logs_of, ray_folder

_OBJECT_STORE_BYTES = 100 * 2**20
_LEAST_MIB = 32
"""The logs and sockets of a start; the object store is in shared memory."""
_LONGEST_FOLDER = 27
"""Bytes. The path of a socket has at most 107, and Ray's are up to 64 longer than the path of its
folder, which is 16 longer than this one."""
_LONGEST_WITH_HAPROXY = 11
"""Bytes. The paths of HAProxy's sockets are up to 82 longer than that of the service's folder,
which is 14 longer than this one."""


@contextmanager
def local_ray(
    config: ServiceConfig, *, shows_logs: bool, min_cpus: int = 1, logs: Path | None = None
) -> Iterator[Watchdog]:
    """Within the block Ray runs here; after it no process, session or file of it is left.

    The same holds after the end of this process, were it killed. Ray's logs are kept in `logs`.
    """
    parent = _short_folder()
    require_ray_room(Path(parent))
    if logs is not None:
        require_room([logs])
    with watched_folder(parent, logs=logs) as (folder, watchdog):
        if logs is not None:
            (logs / RAY_LOGS).symlink_to(logs_of(folder))
        prepare_for_haproxy(haproxy_folder(folder), port=config.port)
        num_cpus = max(_num_cpus(config), min_cpus)
        _start(ray_folder(folder), num_cpus=num_cpus, shows_logs=shows_logs)
        yield watchdog


@contextmanager
def watched_folder(parent: str, *, logs: Path | None) -> Iterator[tuple[Path, Watchdog]]:
    """Within the block this process may start a Ray in a private folder, made in `parent`.

    After the block, or the end of this process, the watchdog ends that Ray and removes the folder.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="eesd-", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"no folder for Ray's files in {parent}: {error.strerror}: make room there, or name "
            "another one in TMPDIR"
        ) from error
    watchdog = Watchdog(folder, logs=logs)
    try:
        yield folder, watchdog
    finally:
        ray.shutdown()
        watchdog.end()


@contextmanager
def service_ray(config: ServiceConfig, *, shows_logs: bool, logs: Path) -> Iterator[None]:
    """Within the block a local Ray runs that the user's other commands find."""
    with local_ray(config, shows_logs=shows_logs, logs=logs) as watchdog:
        address = ray.get_runtime_context().gcs_address
        with connection_file_for(config.port, address=address) as file:
            watchdog.remove_at_end(file)
            yield


@contextmanager
def connected_ray(address: str, *, shows_logs: bool) -> Iterator[None]:
    """Within the block this process is connected to an existing cluster."""
    if is_silent(address):
        raise ConfigError(
            f"no Ray cluster at {address}: nothing accepts connections there: check --address, "
            "and whether Ray runs"
        )
    try:
        ray.init(
            address,
            job_config=job_with_installed_code(),
            logging_level=logging.ERROR,
            log_to_driver=shows_logs,
        )
    except Exception as error:  # Ray raises many classes, without a common base
        raise ConfigError(f"no Ray cluster at {address}: {reason_of(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def without_core_messages() -> Iterator[None]:
    """Silences Ray's core, which writes past Python to the terminal; errors are raised anyway.
    Python writes where it did before."""
    sys.stderr.flush()
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    python, sys.stderr = sys.stderr, os.fdopen(os.dup(terminal), "w", buffering=1)
    _move_logs(python, sys.stderr)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        _move_logs(sys.stderr, python)
        sys.stderr.close()
        sys.stderr = python
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)


def _move_logs(before: TextIO, after: TextIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(after)


def _start(folder: Path, *, num_cpus: int, shows_logs: bool) -> None:
    try:
        ray.init(
            "local",
            job_config=job_with_installed_code(),
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=shows_logs,
            _temp_dir=str(folder),
        )
    except Exception as error:  # Ray raises many classes, without a common base
        root = folder.parent.parent
        raise EngineError(
            f"Ray could not be started: {reason_of(error)} (its files are in {root}, with "
            f"{_free_mib(root)} MiB free; TMPDIR names another folder)"
        ) from error


def require_ray_room(folder: Path) -> None:
    """Raises ConfigError where Ray's files would not fit: it would wait for minutes, or lose its
    head later, and not say why."""
    free = _free_mib(folder)
    if free < _LEAST_MIB:
        raise ConfigError(
            f"{folder} has {free} MiB free, and Ray's files there need {_LEAST_MIB}: make room, or "
            "name another folder in TMPDIR"
        )


def _free_mib(folder: Path) -> int:
    return shutil.disk_usage(folder).free >> 20


def _short_folder() -> str:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            "no folder for temporary files can be written: make room in /tmp, or name a folder of "
            "yours in TMPDIR"
        ) from error
    longest = _LONGEST_WITH_HAPROXY if uses_haproxy() else _LONGEST_FOLDER
    return folder if len(os.fsencode(folder)) <= longest else "/tmp"


def _num_cpus(config: ServiceConfig) -> int:
    """Returns logical CPUs: as many as the placement asks for, however small the machine is."""
    placement, spares = config.placement, config.recovery.spares
    parallel = config.engine.parallel
    per_pipeline = (
        parallel.draft_tensor_parallel_size + spares.num_draft
    ) * placement.draft.num_cpus + (
        parallel.verify_tensor_parallel_size - (placement.mode == "shared") + spares.num_verify
    ) * placement.verify.num_cpus
    num_required = math.ceil(per_pipeline * config.pipelines.max_count)
    return max(os.cpu_count() or 1, num_required)


_NUM_KEPT = 10


def new_log_folder(parent: Path | None, *, port: int) -> Path:
    """Creates a folder in `parent`, or in the user's state folder, and deletes the oldest ones. A
    user without a home folder that can be written has one among the temporary folders.

    Raises ConfigError if it cannot be created.
    """
    if parent is None:
        parent = user_folder("XDG_STATE_HOME", ".local/state", in_temporary="state") / "logs"
    parent = parent.absolute()
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-port{port}-{os.getpid()}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}: name a folder for the logs with --log-folder"
        ) from error
    for old in sorted(filter(_has_ended, parent.glob("*-port*-*")))[:-_NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _has_ended(folder: Path) -> bool:
    """Returns whether Ray's logs are in the folder, or gone, rather than still being written."""
    logs = folder / RAY_LOGS
    return not (logs.is_symlink() and logs.exists())
