"""`eesd controllers`: what a running service has learnt about acceptance."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, echo

from eesd_dist.command_line import add_command
from eesd_dist.errors import ConfigError
from serve_app.cli.running_service import RunningService, echo_json, service_group

if TYPE_CHECKING:
    from rich.table import Table

_SHAPE = {"default": dict, "pinned": bool, "workloads": dict, "pipelines": list}
"""Tells the service's answer from other JSON."""
_UNTIL_HEARD = "it takes effect in the pipelines within a second"

File = Annotated[Path, Argument(metavar="FILE", help="JSON file of pools")]


def show(service: RunningService) -> None:
    """Shows the pools and what is decided from them (default)."""
    service.show("/debug/controllers", shape=_SHAPE, rendered=_rendered)


def save(file: File, service: RunningService) -> None:
    """Writes the pools of all workload classes to a file."""
    from eesd_dist.routing.beliefs import write_snapshot

    with service.connected() as connected:
        priors = connected.priors()
    try:
        write_snapshot(file, priors)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}: name another file") from error
    echo(f"saved: {file}")


def load(file: File, service: RunningService) -> None:
    """Replaces the pools by those of a file; learning continues."""
    _set_pools(service, file, pins=False)


def pin(
    service: RunningService,
    file: Annotated[Path | None, "pools to pin; without it, the present ones"] = None,
) -> None:
    """Stops learning: the pools no longer change."""
    _set_pools(service, file, pins=True)


def unpin(service: RunningService) -> None:
    """Continues learning."""
    with service.connected() as connected:
        connected.unpin()
    echo(f"learning again; {_UNTIL_HEARD}")


def promote(
    head: Annotated[Path, Argument(metavar="HEAD", help="folder of the exit head")],
    service: RunningService,
) -> None:
    """Switches the service to another exit head, without a restart."""
    from serve_app.service.promotion import promote

    reports = promote(
        head,
        address=service.address,
        port=service.port,
        app_name=service.app,
        router=service.router_config(),
    )
    if service.json:
        echo_json([asdict(report) for report in reports])
        return
    for report in reports:
        echo(f"{report.pipeline} drafts with {report.sha256[:12]} from its next round on")
    echo(
        "a restarted service drafts with the head of its configuration, unless its router kept "
        "running: name this one with --head"
    )


def _set_pools(service: RunningService, file: Path | None, *, pins: bool) -> None:
    from eesd_dist.routing.beliefs import read_snapshot

    snapshot = None if file is None else read_snapshot(file)
    with service.connected() as connected:
        if snapshot is not None:
            echo(f"loaded: {connected.set_priors(snapshot)} classes from {file}")
        if pins:
            connected.pin()
            echo(f"pinned; {_UNTIL_HEARD}")


def _rendered(state: Mapping[str, Any]) -> "Iterator[str | Table]":
    default = state["default"]
    storage = f"kept in {state['checkpoint']}" if state["checkpoint"] else "not kept on disk"
    yield f"controller  {default['controller']} unless a request says otherwise"
    yield f"pools       {'pinned' if state['pinned'] else 'learning'}, {storage}"
    yield _workloads(state["workloads"])
    for pipeline in state["pipelines"]:
        yield from _pipeline_lines(pipeline)


def _workloads(workloads: Mapping[str, Mapping[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table("workload", "accepted", "judged tokens", "rounds", "live now")
    for name, pool in workloads.items():
        mean = f"{pool['mean']:.0%}" if pool["weight"] else "unknown"
        numbers = (f"{pool['weight']:.0f}", f"{pool['num_rounds']:.0f}", str(pool["num_live"]))
        table.add_row(name, mean, *numbers)
    return table


def _pipeline_lines(pipeline: Mapping[str, Any]) -> Iterator[str]:
    yield f"pipeline    {pipeline['pipeline']}, {pipeline['num_live']} live requests"
    head, cost, recorder = pipeline["head"], pipeline["cost"], pipeline["recorder"]
    if head is None:
        yield "head        none: nothing is drafted"
        return
    yield (
        f"head        {head['sha256'][:12]} after layer {head['exit_layer']}, {head['kind']}, "
        f"calibrated on {pipeline['calibration']['num_judged']} tokens: {head['folder']}"
    )
    if cost is not None:
        verify_ms = ", ".join(f"{1e3 * seconds:.2f}" for seconds in cost["verify_s"][:5])
        yield (
            f"cost        {1e3 * cost['draft_step_s']:.2f} ms a drafted token, verifying 1, 2, ... "
            f"rows {verify_ms} ms"
        )
    rates = [at["rate"] for at in pipeline["acceptance_by_position"] if at["rate"] is not None]
    lately = " ".join(f"{rate:.0%}" for rate in rates) or "nothing drafted"
    yield f"accepted    at position 1, 2, ... lately {lately}"
    if recorder is not None:
        yield (
            f"recorder    {recorder['num_written']} texts, {recorder['num_dropped']} dropped, "
            f"{recorder['num_bytes'] / 2**20:.1f} MiB"
        )


app = service_group(
    "controllers",
    show,
    description="Shows, pins or replaces what a running service has learnt.",
)
for _action in (show, save, load, pin, unpin, promote):
    add_command(app, _action)
