"""Options of the commands that run an engine, and the configuration they make.

An option sets one key of the configuration; without it the key has the value of the file, or the
default.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.command_line import given
from eesd_dist.errors import ConfigError
from eesd_dist.telemetry.logs import LogFormat
from eesd_dist.types import Device, DTypeSetting, KvCacheDType, Numerics, TreeShape

if TYPE_CHECKING:
    from serve_app.config import ServiceConfig

_KEYS = {
    "model": "engine.model.path",
    "head": "engine.model.head",
    "dtype": "engine.model.dtype",
    "numerics": "engine.model.numerics",
    "kv_cache_dtype": "engine.cache.kv_cache_dtype",
    "device": "engine.model.device",
    "draft_tp": "engine.parallel.draft_tensor_parallel_size",
    "verify_tp": "engine.parallel.verify_tensor_parallel_size",
    "fallback": "engine.parallel.fallback",
    "controller": "engine.speculation.controller",
    "max_draft_tokens": "engine.speculation.max_draft_tokens",
    "tree": "engine.speculation.tree.shape",
    "name": "model_name",
    "host": "host",
    "port": "port",
    "allow_no_key": "allow_no_key",
    "pipelines": "pipelines.max_count",
    "log_folder": "log_folder",
    "log_format": "log_format",
    "otlp_endpoint": "telemetry.otlp_endpoint",
    "trace_folder": "telemetry.trace_folder",
}
_VARIABLES = (
    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "telemetry.otlp_endpoint"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "telemetry.otlp_endpoint"),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "telemetry.otlp_protocol"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", "telemetry.otlp_protocol"),
    ("OTEL_TRACES_SAMPLER", "telemetry.sampler"),
    ("OTEL_TRACES_SAMPLER_ARG", "telemetry.sampler_arg"),
)
"""OpenTelemetry's variables of the process that starts a service, the first of a key first: its
other processes may have another environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Options of every command that runs an engine."""

    config: Annotated[Path | None, "--config FILE.yaml: options override it"] = None
    model: Annotated[Path | None, "folder or hub name of the target model (bundled)"] = None
    head: Annotated[Path | None, "folder of the exit head (MODEL/exit_head)"] = None
    dtype: Annotated[DTypeSetting | None, "type of the weights (auto: as in the checkpoint)"] = None
    numerics: Annotated[Numerics | None, "invariant: texts are bit-for-bit reproducible"] = None
    kv_cache_dtype: Annotated[KvCacheDType | None, "type of stored keys and values (auto)"] = None
    device: Annotated[Device | None, "where to compute (auto)"] = None
    draft_tp: Annotated[int | None, "ranks of the draft stage (1)"] = None
    verify_tp: Annotated[int | None, "ranks of the verify stage (1)"] = None
    controller: Annotated[str | None, "which controller decides draft lengths"] = None
    tree: Annotated[TreeShape | None, "shape of the draft tree (none: chains)"] = None
    max_draft_tokens: Annotated[int | None, "maximum draft length; 0 disables drafting"] = None
    set: Annotated[tuple[str, ...], "--set KEY=VALUE: any configuration key; may be repeated"] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFlags:
    """Options of a command that starts the whole service."""

    host: Annotated[str | None, "address to listen on (127.0.0.1)"] = None
    port: Annotated[int | None, "port to listen on (8000)"] = None
    allow_no_key: Annotated[bool | None, "serve other hosts without an API key (EESD_API_KEY)"] = (
        None
    )
    name: Annotated[str | None, "model name in the API (name of the model folder)"] = None
    fallback: Annotated[
        bool | None,
        "verify ranks also load the draft ranks' layers: decoding continues without drafts while a "
        "draft rank is replaced",
    ] = None
    pipelines: Annotated[int | None, "number of pipelines (1)"] = None
    otlp_endpoint: Annotated[str | None, "OpenTelemetry collector, e.g. http://localhost:4318"] = (
        None
    )
    log_folder: Annotated[Path | None, "folder for logs (~/.local/state/eesd/logs)"] = None
    log_format: Annotated[LogFormat | None, "of log lines: text, or json, one object each"] = None
    trace_folder: Annotated[Path | None, "folder for span files, without a collector"] = None


def config_of(engine: EngineFlags, service: ServiceFlags | None = None) -> "ServiceConfig":
    """Builds the configuration: the file, then options, then every --set. Downloads a model that is
    a name of the hub, which is then the model's name in the API. Raises ConfigError."""
    from serve_app.config import read_service_config, service_config
    from serve_app.service.settings import apply_settings, is_missing, put

    tree = {} if engine.config is None else read_service_config(engine.config)
    flags = given(engine) | ({} if service is None else given(service))
    for flag, key in _KEYS.items():
        if flag in flags:
            put(tree, key, str(flags[flag]) if isinstance(flags[flag], Path) else flags[flag])
    if "pipelines" in flags:
        put(tree, "pipelines.min_count", flags["pipelines"])
    apply_settings(tree, engine.set)
    if is_missing(tree, "engine.model.path"):
        put(tree, "engine.model.path", str(BUNDLED_MODEL))
    variables: dict[str, str] = {}
    for variable, key in _VARIABLES:
        if (value := os.environ.get(variable)) and is_missing(tree, key):
            put(tree, key, value)
            variables[key] = variable
    try:
        return _with_local_folder(service_config(tree))
    except ConfigError as error:
        key, _, complaint = str(error).partition(": ")
        if key in variables:
            raise ConfigError(f"{variables[key]} in the environment: {complaint}") from error
        raise


def _with_local_folder(config: "ServiceConfig") -> "ServiceConfig":
    from eesd_dist.model.checkpoint_folder import with_local_folder

    path = config.engine.model.path
    engine = with_local_folder(config.engine)
    if engine is config.engine:
        return config
    # The file's name, and of the hub the whole name; the bundled model has that of its folder.
    name = config.model_name
    if engine.model.path != BUNDLED_MODEL:
        name = name or (path.stem if path.exists() else str(path))
    return config.model_copy(update={"engine": engine, "model_name": name})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    prompt: Annotated[str, Argument(metavar="PROMPT", help="the prompt; - reads standard input")]
    raw: Annotated[bool, "continue the prompt itself: no chat template"] = False
    max_tokens: Annotated[int, "maximum length of the text"] = 256
    temperature: Annotated[float, "0 is greedy"] = 0.0
    top_p: Annotated[float, "nucleus sampling"] = 1.0
    seed: Annotated[int | None, "the same seed gives the same text (drawn, and shown)"] = None
    no_speculation: Annotated[bool, "plain decoding: the same text, slower"] = False
    color: Annotated[Literal["auto", "always", "never"], "mark accepted draft tokens"] = "auto"
