"""`eesd pipelines`: what a running service is served by, and the means to empty a pipeline.

    eesd pipelines [--url URL] [--json]          which pipelines there are and what they do
    eesd pipelines drain NAME                    its streams go on elsewhere, it takes no more
    eesd pipelines undrain NAME                  it takes requests again

Looking goes over HTTP. Changing goes over Ray, to the service that this user's `eesd serve` has
started on --port, or to the cluster at --address: nothing over HTTP changes anything.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from serve_app.cli.status import add_service, fetched, not_ours, url_of
from serve_app.config import RouterConfig
from serve_app.session.connection_file import prepare_to_join

if TYPE_CHECKING:  # it imports Ray, which reads the environment when it is imported
    from serve_app.pipeline.kv_migration import HandoverReport

_PAGE = "/debug/pipelines"
_SHAPE = {"pipelines": list}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.action in (None, "list"):
        _list(options)
    else:
        _change(options)
    return 0


# -- looking --------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> None:
    url = url_of(options)
    pipelines = fetched(url, _PAGE, shape=_SHAPE)["pipelines"]
    if options.json:
        _say(json.dumps(pipelines, indent=2))
        return
    try:
        table = _table(pipelines)
    except KeyError as error:
        raise not_ours(url, f"no {error} in its answer") from error
    Console(file=sys.stdout).print(table)


def _table(pipelines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("pipeline", "replica", "state", "generation", "live", "weight", "draining")
    for each in pipelines:
        table.add_row(
            each["pipeline"],
            each["address"],
            "whole" if each["is_whole"] else f"not whole: {each['last_trouble']}",
            str(each["generation"]),
            str(each["num_live"]),
            "not measured" if each["weight"] is None else f"{each['weight']:.1f}",
            each["draining"] or "no",
        )
    return table


# -- changing -------------------------------------------------------------------------------------


def _change(options: argparse.Namespace) -> None:
    address = prepare_to_join(options.address, port=options.port)
    from serve_app.operations.connect import joined  # Ray reads the environment when it is imported

    router = RouterConfig(name=options.router, namespace=options.namespace)
    with joined(address, router=router, app_name=options.app) as service:
        if options.action == "drain":
            drained = service.drain(options.name)
            _say(
                f"{drained.pipeline} takes no more requests; {drained.num_moved} streams go on "
                f"elsewhere{_taken_along(drained.handover)}"
            )
        else:
            service.undrain(options.name)
            _say(f"{options.name} takes requests again")


def _taken_along(handover: "HandoverReport | None") -> str:
    if handover is None:
        return ""
    if handover.how == "recomputed":
        return f", computed again from their tokens: {handover.reason or 'nothing was cached'}"
    return (
        f", with {handover.num_pages} pages ({handover.num_bytes / 2**20:.1f} MiB, "
        f"{handover.seconds:.1f} s)"
    )


# -- words ----------------------------------------------------------------------------------------


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eesd pipelines",
        description="What a running service is served by, and the means to empty a pipeline.",
    )
    add_service(parser, is_top=True)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    described = {
        "list": "which pipelines there are and what they do (the default)",
        "drain": "live streams go on elsewhere, and the pipeline takes no more requests",
        "undrain": "the pipeline takes requests again",
    }
    for name, text in described.items():
        action = actions.add_parser(name, help=text)
        add_service(action, is_top=False)
        if name != "list":
            action.add_argument("name", metavar="NAME", help="as `eesd pipelines` lists it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
