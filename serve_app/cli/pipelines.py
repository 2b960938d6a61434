"""`eesd pipelines`: lists and drains the pipelines of a running service."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, echo

from eesd_dist.command_line import add_command
from serve_app.cli.running_service import RunningService, service_group

if TYPE_CHECKING:
    from rich.console import RenderableType

    from serve_app.pipeline.kv_migration import MigrationReport

Name = Annotated[str, Argument(metavar="NAME", help="as `eesd pipelines` lists it")]


def list_pipelines(service: RunningService) -> None:
    """Lists the pipelines and their states (default)."""
    service.show("/debug/pipelines", shape={"pipelines": list, "starting": list}, rendered=_tables)


def drain(name: Name, service: RunningService) -> None:
    """Moves a pipeline's streams to others; it gets no requests."""
    with service.connected() as connected:
        drained = connected.drain(name)
    echo(
        f"{drained.pipeline} takes no more requests; {drained.num_migrated} streams continue in "
        f"other pipelines{_migration_text(drained.migration)}"
    )


def undrain(name: Name, service: RunningService) -> None:
    """Sends requests to a drained pipeline again."""
    with service.connected() as connected:
        connected.undrain(name)
    echo(f"{name} takes requests again")


def _fleet_line(fleet: Mapping[str, Any]) -> str:
    """Returns how many pipelines there should be, and why, like `wanted 2 of 1 to 4 (ready 1,
    starting 1, draining 0, 3 requests wait) for 12 s: up from 1 to 2: ...`."""
    return (
        f"wanted {fleet['wanted']} of {fleet['min_count']} to {fleet['max_count']} (ready "
        f"{fleet['num_ready']}, starting {fleet['num_starting']}, draining "
        f"{fleet['num_draining']}, {fleet['num_waiting']} requests wait) for "
        f"{fleet['since_s']:.0f} s: {fleet['reason']}"
    )


def _tables(page: Mapping[str, Any]) -> "Iterator[RenderableType]":
    from rich.table import Table

    table = Table(
        "pipeline", "replica pid", "state", "epoch", "live", "KV tokens", "weight", "draining"
    )
    for pipeline in page["pipelines"]:
        table.add_row(
            pipeline["pipeline"],
            str(pipeline["pid"]),
            pipeline["unavailable"] or "ready",
            str(pipeline["epoch"]),
            str(pipeline["num_live"]),
            _kv_cache(pipeline["kv_cache"]),
            "not measured" if pipeline["weight"] is None else f"{pipeline['weight']:.1f}",
            pipeline["draining"] or "no",
        )
    if page["pipelines"]:
        yield table
    for pipeline in page["pipelines"]:
        for worker in pipeline["workers"]:
            for reason in worker.get("slow_kernels", ()):  # an older service names none
                yield f"{pipeline['pipeline']}: slow: {worker['name']} computes {reason}"
    for pipeline in page["starting"]:
        yield f"{pipeline['pipeline']}: {pipeline['reason']}"
    if page["fleet"] is not None:
        yield _fleet_line(page["fleet"])
    if page["refused_settings"]:
        yield f"not applied: {page['refused_settings']}"


def _kv_cache(capacity: Mapping[str, Any] | None) -> str:
    """Returns tokens, and the bytes of the largest rank, like `22528 (512 MiB a rank)`."""
    if capacity is None:
        return "not sized"
    rank_bytes = capacity["rank_bytes"].values()  # none of a claimed pipeline before a new epoch
    rank_size = f" ({max(rank_bytes) / 2**20:.0f} MiB a rank)" if rank_bytes else ""
    return f"{capacity['num_tokens']}{rank_size}"


def _migration_text(migration: "MigrationReport | None") -> str:
    if migration is None:
        return ""
    if migration.how == "recomputed":
        return f", recomputed from their tokens: {migration.reason or 'nothing was cached'}"
    return (
        f", with {migration.num_pages} pages ({migration.num_bytes / 2**20:.1f} MiB, "
        f"{migration.seconds:.1f} s)"
    )


app = service_group(
    "pipelines",
    list_pipelines,
    description="Lists the pipelines of a running service, and drains one.",
)
add_command(app, list_pipelines, name="list")
add_command(app, drain)
add_command(app, undrain)
