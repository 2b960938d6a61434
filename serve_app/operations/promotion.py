"""Gives a running service another exit head, without a restart and without a changed token.

In a process of its own: a process keeps the first token of a Ray that it has read, and whoever
promotes a head may just have trained it on a Ray of its own.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from eesd_dist.errors import ConfigError, EesdError, EngineError
from eesd_dist.workers.messages import HeadReport
from serve_app.config import RouterConfig
from serve_app.session.connection_file import prepare_to_join

_REFUSED = 2


def promote(
    folder: Path,
    *,
    address: str | None = None,
    port: int = 8000,
    app_name: str = "eesd",
    router: RouterConfig | None = None,
    instead_of: Collection[str] = (),
) -> list[HeadReport]:
    """Every pipeline drafts with this head from its next round on; one report for each.

    `address` is the Ray cluster's; without one, the service is the one that `eesd serve` of this
    user has started on `port`. `instead_of` are the heads (sha256) that it may take the place of;
    empty: any. Raises ConfigError when the head does not fit, or another one serves (the service
    goes on with the one it has), EngineError when the service cannot be reached.
    """
    router = router or RouterConfig()
    words = [str(folder.resolve()), "--port", str(port), "--app", app_name]
    words += ["--router", router.name, "--namespace", router.namespace]
    words += ["--address", address] if address is not None else []
    words += [word for sha256 in instead_of for word in ("--instead-of", sha256)]
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.operations.promotion", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    answer = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and answer:
        return [HeadReport(**report) for report in json.loads(answer[-1])]
    reason = answer[-1] if answer else f"exit status {done.returncode}"
    raise ConfigError(reason) if done.returncode == _REFUSED else EngineError(reason)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve_app.operations.promotion")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--app", default="eesd")
    parser.add_argument("--router", default=RouterConfig().name)
    parser.add_argument("--namespace", default=RouterConfig().namespace)
    parser.add_argument("--instead-of", action="append", default=[], metavar="SHA256")
    options = parser.parse_args(argv)
    try:
        address = prepare_to_join(options.address, port=options.port)
        # Ray reads the environment when it is imported.
        from serve_app.operations.connect import joined

        router = RouterConfig(name=options.router, namespace=options.namespace)
        with joined(address, router=router, app_name=options.app) as service:
            reports = service.load_head(str(options.folder), instead_of=options.instead_of)
    except EesdError as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED if isinstance(error, ConfigError) else 1
    sys.stdout.write(json.dumps([asdict(report) for report in reports]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
