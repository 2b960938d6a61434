"""Gives a running service another exit head, without a restart and without a changed token.

It runs in a separate process: a process keeps the first Ray token that it has read, and the caller
may just have trained the head on another Ray instance.
"""

import json
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from eesd_dist.errors import ConfigError, EesdError, EngineError
from eesd_dist.workers.messages import HeadReport
from serve_app.config import RouterConfig
from serve_app.service.connection_file import prepare_to_connect

_REFUSED = 2
_ANSWER = "reports: "
"""Start of the line with the answer: Ray may print others."""


def promote(
    folder: Path,
    *,
    address: str | None = None,
    port: int | None = None,
    app_name: str = "eesd",
    router: RouterConfig | None = None,
    instead_of: Collection[str] = (),
) -> list[HeadReport]:
    """Loads the head into every pipeline, for use from its next round on; one report for each.

    `address` is the Ray cluster's; without it, the service is the one that this user's `eesd serve`
    has started, on `port` where there are several. `instead_of` are the heads (sha256) that it may
    replace; empty: any.
    Raises ConfigError when the head does not fit or another head serves (which stays in use),
    EngineError when the service cannot be reached.
    """
    router = router or RouterConfig()
    request = {
        "folder": str(folder.resolve()),
        "address": address,
        "port": port,
        "app_name": app_name,
        "router": {"name": router.name, "namespace": router.namespace},
        "instead_of": [*instead_of],
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "serve_app.service.promotion", json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    # The answer counts, not the status: Ray may end a process that disconnects with one of its own.
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            return [HeadReport(**report) for report in json.loads(line.removeprefix(_ANSWER))]
    errors = done.stderr.strip().splitlines()
    reason = errors[-1] if errors else f"exit status {done.returncode}"
    raise ConfigError(reason) if done.returncode == _REFUSED else EngineError(reason)


def _load_head(
    *,
    folder: str,
    address: str | None,
    port: int | None,
    app_name: str,
    router: dict[str, str],
    instead_of: Collection[str],
) -> None:
    """Prints the reports, before it disconnects."""
    address = prepare_to_connect(address, port=port)
    # Ray reads the environment when it is imported.
    from serve_app.service.connect import service_connection

    at = RouterConfig.model_validate(router)
    with service_connection(address, router=at, app_name=app_name) as service:
        reports = service.load_head(folder, instead_of=instead_of)
        sys.stdout.write(f"{_ANSWER}{json.dumps([asdict(report) for report in reports])}\n")
        sys.stdout.flush()


def _main(request: str) -> int:
    try:
        _load_head(**json.loads(request))
    except EesdError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1]))
