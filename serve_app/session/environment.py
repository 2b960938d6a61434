"""What has to stand in the environment before Ray is imported.

Ray reads some of it while it is being imported and hands the rest to the processes it starts, so
this is called first, by the command line, and by nothing else.
"""

import os
import secrets
from functools import cache

TOKEN = "RAY_AUTH_TOKEN"


def prepare_for_local_ray(*, shows_logs: bool = False) -> None:
    """Only the processes of this very Ray have its token."""
    _keep_stdout_ours(shows_logs=shows_logs)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            TOKEN: _token(),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A service whose actors are known from the start has no use for idle workers in store.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_metrics_collection": "0",
            # A process that hangs cannot end itself, and its place is not free before it has ended.
            "RAY_kill_worker_timeout_milliseconds": "1000",
        }
    )
    # On a busy machine the HTTP proxy takes longer to come up than Serve's five seconds, and one
    # that is late is killed.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")


def prepare_for_cluster(*, token: str | None = None, shows_logs: bool = False) -> None:
    """Without a word about authentication, nodes and drivers guess differently."""
    _keep_stdout_ours(shows_logs=shows_logs)
    if token is None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    else:
        os.environ.update({"RAY_AUTH_MODE": "token", TOKEN: token})


def _keep_stdout_ours(*, shows_logs: bool) -> None:
    """Of every process that died Ray tells all drivers, and they print a paragraph amid results.

    `log_to_driver=False` does not stop these; a pattern that any line has does.
    """
    if not shows_logs:
        os.environ.update({"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "^"})


@cache
def _token() -> str:
    """One for all that this process ever starts: Ray keeps the first it has read."""
    return secrets.token_hex(32)
