"""What has to stand in the environment before Ray is imported.

Ray reads some of it while it is being imported and hands the rest to the processes it starts, so
this is called first, by the command line, and by nothing else.
"""

import os
import secrets
from functools import cache


def prepare_for_local_ray() -> None:
    """Only the processes of this very Ray have its token."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _token(),
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


def prepare_for_cluster() -> None:
    """Without a word about authentication, nodes and drivers guess differently."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")


@cache
def _token() -> str:
    """One for all that this process ever starts: Ray keeps the first it has read."""
    return secrets.token_hex(32)
