"""`eesd controllers`: what a running service believes about acceptance, and the means to pin it.

    eesd controllers [--url URL] [--json]        what is believed, and what decides from it
    eesd controllers save FILE                   every class's pooled belief into a file
    eesd controllers load FILE                   begin with a file's pools
    eesd controllers pin [--file FILE]           pools no longer change, from now or with a file's
    eesd controllers unpin                       they learn again
    eesd controllers promote HEAD                draft with another exit head, without a restart

Looking goes over HTTP. Changing goes over Ray, to the service that this user's `eesd serve` has
started on --port, or to the cluster at --address: nothing over HTTP changes anything.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eesd_dist.errors import ConfigError
from eesd_dist.routing.beliefs import read_snapshot, write_snapshot
from serve_app.cli.status import add_service, fetched, not_ours, url_of
from serve_app.config import RouterConfig
from serve_app.operations.promotion import promote
from serve_app.session.connection_file import prepare_to_join

_PAGE = "/debug/controllers"
_SHAPE = {"default": dict, "pinned": bool, "workloads": dict, "pipelines": list}
"""What tells an answer of ours from anybody else's JSON."""
_UNTIL_HEARD = "pipelines hear of it within a second"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.action in (None, "show"):
        _show(options)
    elif options.action == "promote":
        _promote(options)
    else:
        _change(options)
    return 0


# -- looking --------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> None:
    url = url_of(options)
    state = fetched(url, _PAGE, shape=_SHAPE)
    if options.json:
        _say(json.dumps(state, indent=2))
        return
    try:
        _show_state(state)
    except KeyError as error:
        raise not_ours(url, f"no {error} in its answer") from error


def _show_state(state: Mapping[str, Any]) -> None:
    console = Console(file=sys.stdout)
    default = state["default"]
    console.print(f"controller  {default['controller']} unless a request says otherwise")
    console.print(f"pools       {'pinned' if state['pinned'] else 'learning'}, {_kept(state)}")
    console.print(_workloads(state["workloads"]))
    for pipeline in state["pipelines"]:
        _show_pipeline(console, pipeline)


def _kept(state: Mapping[str, Any]) -> str:
    return f"kept in {state['checkpoint']}" if state["checkpoint"] else "not kept on disk"


def _workloads(workloads: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("workload", "accepted", "judged tokens", "rounds", "live now")
    for name, pool in workloads.items():
        mean = f"{pool['mean']:.0%}" if pool["weight"] else "unknown"
        numbers = (f"{pool['weight']:.0f}", f"{pool['num_rounds']:.0f}", str(pool["num_live"]))
        table.add_row(name, mean, *numbers)
    return table


def _show_pipeline(console: Console, pipeline: Mapping[str, Any]) -> None:
    console.print(f"pipeline    {pipeline['pipeline']}, {pipeline['num_live']} live requests")
    head = pipeline["head"]
    if head is None:
        console.print("head        none: nothing is drafted")
        return
    calibration = pipeline["calibration"]
    console.print(
        f"head        {head['sha256'][:12]} after layer {head['exit_layer']}, {head['kind']}, "
        f"calibrated on {calibration['num_judged']} tokens: {head['folder']}"
    )
    cost = pipeline["cost"]
    if cost is not None:
        verify_ms = ", ".join(f"{1e3 * seconds:.2f}" for seconds in cost["verify_s"][:5])
        console.print(
            f"cost        {1e3 * cost['draft_step_s']:.2f} ms a drafted token, verifying 1, 2, ... "
            f"rows {verify_ms} ms"
        )
    lately = [
        f"{at['rate']:.0%}" for at in pipeline["acceptance_by_position"] if at["rate"] is not None
    ]
    console.print(
        f"accepted    at position 1, 2, ... lately {' '.join(lately) or 'nothing drafted'}"
    )
    spool = pipeline["spool"]
    if spool is not None:
        console.print(
            f"spool       {spool['num_written']} texts, {spool['num_dropped']} dropped, "
            f"{spool['num_bytes'] / 2**20:.1f} MiB"
        )


# -- changing -------------------------------------------------------------------------------------


def _change(options: argparse.Namespace) -> None:
    snapshot = None if options.action == "save" or not options.file else read_snapshot(options.file)
    address = prepare_to_join(options.address, port=options.port)
    from serve_app.operations.connect import joined  # Ray reads the environment when it is imported

    router = RouterConfig(name=options.router, namespace=options.namespace)
    with joined(address, router=router, app_name=options.app) as service:
        if options.action == "save":
            found = service.priors()
            _write(options.file, found)
            _say(f"saved: {options.file}")
            return
        if snapshot is not None:
            _say(f"loaded: {service.set_priors(snapshot)} classes from {options.file}")
        if options.action == "pin":
            service.pin()
            _say(f"pinned; {_UNTIL_HEARD}")
        elif options.action == "unpin":
            service.unpin()
            _say(f"learning again; {_UNTIL_HEARD}")


def _write(file: Path, priors: Mapping[str, object]) -> None:
    try:
        write_snapshot(file, priors)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}: name another file") from error


def _promote(options: argparse.Namespace) -> None:
    router = RouterConfig(name=options.router, namespace=options.namespace)
    reports = promote(
        options.head,
        address=options.address,
        port=options.port,
        app_name=options.app,
        router=router,
    )
    if options.json:
        _say(json.dumps([asdict(report) for report in reports], indent=2))
        return
    for report in reports:
        _say(f"{report.pipeline} drafts with {report.sha256[:12]} from its next round on")
    _say(
        "a router that outlives the service goes on with it; else a restarted service has the "
        "head of its configuration again: name this one with --head"
    )


# -- words ----------------------------------------------------------------------------------------


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eesd controllers",
        description="What a running service believes about acceptance, and the means to pin it.",
    )
    add_service(parser, is_top=True)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    described = {
        "show": "what is believed, and what decides from it (the default)",
        "save": "every class's pooled belief into FILE",
        "load": "begin with the pools of FILE",
        "pin": "pools no longer change",
        "unpin": "pools learn again",
        "promote": "draft with another exit head, without a restart",
    }
    for name, text in described.items():
        action = actions.add_parser(name, help=text)
        add_service(action, is_top=False)
        if name in ("save", "load"):
            action.add_argument("file", type=Path, metavar="FILE")
        elif name == "promote":
            action.add_argument("head", type=Path, metavar="HEAD", help="the exit head's folder")
        else:
            action.set_defaults(file=None)
    actions.choices["pin"].add_argument("--file", type=Path, help="pools to pin; else as they are")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
