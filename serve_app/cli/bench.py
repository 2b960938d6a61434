"""`eesd bench`: the benchmarks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from eesd_dist.bench import options as engine
from eesd_dist.bench.options import CostsOptions, FuzzOptions
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.command_line import Conversion, add_callback, add_module, group
from eesd_dist.errors import ConfigError
from serve_app.bench import options as service

_FUZZ = "exact --random"
_PYTEST = "python -m pytest"
REMOVED = {
    "autoscaling": "`make test-autoscaling` in the repository",
    "endure": "`make test-endurance` in the repository",
    "filters": f"`{_PYTEST} -m slow tests/unit/sampling/test_filters.py`",
    "grammars": f"`{_PYTEST} -m slow tests/unit/text/test_grammar_corpus.py`",
    "host": "`eesd bench control` or `offline`, whose ms_per_round has plan, draft and commit",
    "memory": "`eesd bench offline`, which compares plain decoding with transformers",
    "migration": f"`{_PYTEST} tests/serve/test_kv_migration.py`",
    "noise": f"`{_PYTEST} -m slow tests/unit/sampling/test_noise.py`",
    "plan": "`make test-plan` in the repository",
    "rounds": "`eesd bench control`, or `make bench-online` for a service with and without overlap",
    "router": f"`{_PYTEST} tests/unit/routing/test_beliefs.py`",
    "tracing": "`eesd bench online` against services that differ in `telemetry` alone",
}
"""Benchmarks of earlier releases, and their replacements."""


class _Benchmarks(TyperGroup):
    """Resolves `exact` with --random or --case, which has other options, to a separate command.

    Names the replacement of a benchmark that was removed.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in REMOVED:
            raise ConfigError(f"`eesd bench {args[0]}` was removed: use {REMOVED[args[0]]}")
        name, command, arguments = super().resolve_command(ctx, args)
        if name == "exact" and any(
            word.split("=")[0] in ("--random", "--case") for word in arguments
        ):
            command = self.commands[_FUZZ]
        return name, command, arguments


def _local_folder(path: Path) -> Path:
    from eesd_dist.model.checkpoint_folder import local_folder  # torch, for some models

    return local_folder(path)


_LOCAL: Mapping[str, Conversion] = {"model": _local_folder}


def bench() -> None:
    """Measures speed, or checks exactness. Prints a table, and one JSON object at the end."""


app = group("bench", cls=_Benchmarks)
add_callback(app, bench)
add_module(app, "offline", engine.OfflineOptions, "eesd_dist.bench.offline", conversions=_LOCAL)
add_module(app, "online", engine.OnlineOptions, "eesd_dist.bench.online")
add_module(
    app,
    "exact",
    service.ExactOverActorsOptions,
    "serve_app.bench.exact_over_actors",
    conversions=_LOCAL,
)
add_module(
    app,
    _FUZZ,
    FuzzOptions,
    "eesd_dist.bench.fuzz.command",
    defaults={"model": (BUNDLED_MODEL,)},
)
add_module(app, "batch", engine.BatchedOptions, "eesd_dist.bench.batched", conversions=_LOCAL)
add_module(app, "costs", CostsOptions, "eesd_dist.bench.costs.command", conversions=_LOCAL)
add_module(app, "control", engine.ControlOptions, "eesd_dist.bench.control", conversions=_LOCAL)
add_module(app, "chaos", service.ChaosOptions, "serve_app.bench.chaos.command", conversions=_LOCAL)
