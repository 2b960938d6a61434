"""`eesd`: the list of its commands.

Declarations import no torch, Ray or transformers; what a command does is imported when it runs.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

from typer import echo

from cluster.fleet.options import FleetOptions
from cluster.planning.options import PlanOptions
from cluster.preflight.options import PreflightOptions
from eesd_dist.command_line import add_callback, add_command, add_module, group, run_app
from eesd_dist.loopback import bypass_proxies
from serve_app.cli import bench, controllers, distill, pipelines
from serve_app.cli.batch import batch
from serve_app.cli.generate import generate
from serve_app.cli.serve import serve
from serve_app.cli.stop import stop
from serve_app.cli.trace import trace
from serve_app.cli.wait import wait


def main(argv: Sequence[str] | None = None) -> int:
    bypass_proxies()
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        words = ["version"]
    return run_app(app, words, program="eesd")


def eesd(verbose: Annotated[bool, "log what happens"] = False) -> None:
    """Lossless early-exit speculative decoding.

    Commands that take a model use the bundled one unless told otherwise.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def version() -> None:
    """Prints the version, as `--version` does."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        echo(f"eesd {version_of('eesd-dist')}")
    except PackageNotFoundError:
        echo("eesd, not installed as a package")


app = group("eesd")
add_callback(app, eesd)
for _command in (serve, wait, stop, generate, batch, trace):
    add_command(app, _command)
add_module(app, "plan", PlanOptions, "cluster.planning.command")
add_module(app, "plan-fleet", FleetOptions, "cluster.fleet.command")
add_module(app, "preflight", PreflightOptions, "cluster.preflight.command")
add_command(app, version)
for _group in (controllers, pipelines, bench, distill):
    app.add_typer(_group.app)

if __name__ == "__main__":
    raise SystemExit(main())
