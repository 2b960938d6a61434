"""`eesd bench`: the benchmarks."""

from typing import Any

from typer.core import TyperGroup

from cluster.planning.accuracy_options import AccuracyOptions
from eesd_dist.bench import options as engine
from eesd_dist.bench.costs.options import CostsOptions, MemoryOptions
from eesd_dist.bench.fuzz.options import FuzzOptions
from eesd_dist.bench.prompts import BUNDLED_MODEL
from eesd_dist.command_line import add_callback, add_module, group
from serve_app.bench import options as service

_FUZZ = "exact --random"


class _Benchmarks(TyperGroup):
    """Resolves `exact` with --random or --case, which has other options, to a separate command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name == "exact" and any(word.split("=")[0] in ("--random", "--case") for word in rest):
            command = self.commands[_FUZZ]
        return name, command, rest


def bench() -> None:
    """Measures speed, or checks exactness. Prints a table, and one JSON object at the end."""


app = group("bench", cls=_Benchmarks)
add_callback(app, bench)
add_module(app, "offline", engine.OfflineOptions, "eesd_dist.bench.offline")
add_module(app, "online", engine.OnlineOptions, "eesd_dist.bench.online")
add_module(app, "exact", service.ExactOverActorsOptions, "serve_app.bench.exact_over_actors")
add_module(
    app,
    _FUZZ,
    FuzzOptions,
    "eesd_dist.bench.fuzz.command",
    defaults={"model": (BUNDLED_MODEL,)},
)
add_module(app, "batch", engine.BatchedOptions, "eesd_dist.bench.batched")
add_module(app, "host", engine.HostOptions, "eesd_dist.bench.host")
add_module(app, "costs", CostsOptions, "eesd_dist.bench.costs.command")
add_module(app, "memory", MemoryOptions, "eesd_dist.bench.costs.memory")
add_module(app, "plan", AccuracyOptions, "cluster.planning.accuracy")
add_module(app, "noise", engine.NoiseOptions, "eesd_dist.bench.noise")
add_module(app, "filters", engine.FiltersOptions, "eesd_dist.bench.filters")
add_module(app, "grammars", engine.GrammarsOptions, "eesd_dist.bench.grammars.command")
add_module(app, "control", engine.ControlOptions, "eesd_dist.bench.control")
add_module(app, "router", service.RouterOptions, "serve_app.bench.router.command")
add_module(app, "rounds", service.RoundsOptions, "serve_app.bench.rounds.command")
add_module(app, "tracing", service.TracingBenchOptions, "serve_app.bench.tracing.command")
add_module(app, "chaos", service.ChaosOptions, "serve_app.bench.chaos.command")
add_module(app, "endure", service.EndureOptions, "serve_app.bench.endure.command")
add_module(app, "migration", service.MigrationOptions, "serve_app.bench.kv_migration")
add_module(app, "autoscaling", service.AutoscalingOptions, "serve_app.bench.autoscaling.command")
