"""The configuration of a service: one frozen tree, from a YAML file, flags or Serve's `args`.

An engine's settings are `eesd_dist.config`; this adds the service around it: where its actors are
placed, how it is reached, how long recovery may take.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from eesd_dist.config import EngineConfig, HomePath, Section, complaint_of
from eesd_dist.control.registry import entry_of
from eesd_dist.errors import ConfigError
from eesd_dist.routing.fleet.size import FleetTargets
from eesd_dist.telemetry.logs import LogFormat
from eesd_dist.telemetry.tracing_options import MAX_ROUND_SPANS, OtlpProtocol, TracingOptions
from eesd_dist.workers.messages import TelemetryOptions
from serve_app.placement_config import BundleConfig, PlacementConfig

_MIN_HEARTBEATS = 3
"""Heartbeats that have to fit into the time after which a pipeline is forgotten."""

_MIN_PAUSE_S = 60.0
_STARTS_WAITED = 3.0

Sampler = Literal[
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
]

_TARGETS = FleetTargets()


class PipelinesConfig(Section):
    """Number of pipelines that serve at the same time. docs/autoscaling.md has the formula."""

    min_count: NonNegativeInt = _TARGETS.min_count
    """Pipelines that always run. 0: an idle service has none, and its next request waits for the
    start of one."""

    max_count: PositiveInt = _TARGETS.max_count
    """Above `min_count`, pipelines are added and drained by load."""

    target_live_requests: PositiveFloat = _TARGETS.live_requests
    """Live requests per pipeline that autoscaling aims at."""

    target_utilisation: float = Field(default=_TARGETS.utilisation, gt=0.0, le=1.0)
    """Share of a pipeline's measured tokens per second that autoscaling aims at."""

    target_kv_use: float = Field(default=_TARGETS.kv_use, gt=0.0, le=1.0)
    """Share of a pipeline's KV pages in use that autoscaling aims at."""

    target_first_token_s: PositiveFloat | None = _TARGETS.first_token_s
    """Time from a request's arrival at its pipeline to its first token that nine of ten requests
    should keep; None: it is no signal."""

    shrink_at: float = Field(default=_TARGETS.shrink_at, gt=0.0, lt=1.0)
    """Share of the targets to which the others may be loaded when a pipeline is given up; 0.7
    tolerates a load varying by 17 %."""

    up_delay_s: NonNegativeFloat = _TARGETS.up_delay_s
    """Time for which the load must exceed the targets before pipelines are added. The first
    pipeline of an idle service is started at once."""

    down_delay_s: NonNegativeFloat = _TARGETS.down_delay_s
    """Time of low load before a pipeline is drained, and pause after any change. Longer than a
    start, which it would waste."""

    idle_delay_s: NonNegativeFloat = _TARGETS.idle_delay_s
    """Time without a request before the last pipeline is given up, where `min_count` is 0."""

    max_step: PositiveInt = _TARGETS.max_step
    """Maximum pipelines added by one decision."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.max_count < self.min_count:
            raise ValueError(
                f"max_count is {self.max_count}, below min_count {self.min_count}: raise max_count"
            )
        return self

    @property
    def is_autoscaled(self) -> bool:
        return self.max_count > self.min_count

    @property
    def targets(self) -> FleetTargets:
        return FleetTargets(
            min_count=self.min_count,
            max_count=self.max_count,
            live_requests=self.target_live_requests,
            utilisation=self.target_utilisation,
            kv_use=self.target_kv_use,
            first_token_s=self.target_first_token_s,
            shrink_at=self.shrink_at,
            up_delay_s=self.up_delay_s,
            down_delay_s=self.down_delay_s,
            idle_delay_s=self.idle_delay_s,
            max_step=self.max_step,
        )


class SparesConfig(Section):
    """Processes that each pipeline keeps up for lost workers. Each takes a bundle of its own, with
    the GPU of a rank of its stage."""

    draft: NonNegativeInt | None = None
    """Loaded spares for the drafting actor. None: 1 in the only pipeline of a local `eesd serve` on
    CPUs if memory has room, else 0."""

    verify: NonNegativeInt | None = None
    """Spares for verify ranks. Which rank is not known before one is lost: its weights are loaded
    then. None: as for `draft`."""

    @property
    def num_draft(self) -> int:
        return self.draft or 0

    @property
    def num_verify(self) -> int:
        return self.verify or 0


class RecoveryConfig(Section):
    """Recovery from a lost process or link of a pipeline."""

    stream_pause_s: PositiveFloat | None = None
    """Longest a stream waits without a token for a pipeline; then an error. None: three times the
    slowest pipeline's start, at least a minute."""

    load_timeout_s: PositiveFloat = 900.0
    """Longest a start may take: processes, weights, first rounds."""

    drain_s: PositiveFloat = 20.0
    """Longest time for which streams go on when the service or a pipeline is taken down."""

    kv_migration: Literal["pages", "recompute"] = "pages"
    """Way in which streams leave a drained pipeline: `pages` copies their KV pages to an equal
    pipeline; `recompute`, and a failed copy, compute them again."""

    lease_s: PositiveFloat = 60.0
    """Time for which a pipeline's workers wait for a new supervisor before they exit and free GPUs.
    Longer than Serve takes to replace a replica."""

    resume_window_s: Annotated[NonNegativeFloat, Field(le=3600.0)] = 60.0
    """Time for which a stream's tokens are kept after its client has left, for `Last-Event-ID`.
    Later, and with 0, they are computed again."""

    spares: SparesConfig = SparesConfig()

    max_interruptions: PositiveInt = 4
    """Interruptions in a row, with requests and without a token, after which a pipeline is given
    up."""

    suspect_after: PositiveInt = 2
    """Attributable crashes since its last token that make a request a suspect: it then runs alone,
    and another one refuses it. Other requests go on."""

    def pause_for(self, start_s: float | None) -> float:
        """Returns the longest pause of a stream, where pipelines take `start_s` to start."""
        if self.stream_pause_s is not None:
            return self.stream_pause_s
        return max(_MIN_PAUSE_S, _STARTS_WAITED * (start_s or 0.0))


class LimitsConfig(Section):
    """Limits of one HTTP request. docs/security.md lists what is refused and how."""

    max_body_bytes: PositiveInt | None = None
    """Maximum size of a body; None: 1 MiB and 16 bytes for each token of `max_model_len`."""

    max_json_depth: PositiveInt = 64
    """Maximum nesting of a body."""

    max_choices: PositiveInt | None = None
    """Maximum texts of one request, prompts x n; None: four times `scheduler.max_running`. Half of
    `scheduler.max_running` are generated at the same time."""

    max_answer_extras: PositiveInt = 262_144
    """Maximum log-probabilities in one answer, each alternative counted, and prompt tokens that
    `echo` and `return_token_ids` repeat for each of its texts."""

    strict_fields: bool = False
    """Refuses unknown fields of a body; else they are ignored, with a warning in the answer."""

    read_timeout_s: PositiveFloat = 20.0
    """Longest a body may take to arrive."""

    request_ttl_s: PositiveFloat = 3600.0
    """Longest a request may take, from its arrival to its last token, waiting included."""

    @model_validator(mode="after")
    def _a_body_arrives_in_time(self) -> Self:
        if self.read_timeout_s >= self.request_ttl_s:
            raise ValueError(
                f"request_ttl_s is {self.request_ttl_s:g}, not above read_timeout_s "
                f"{self.read_timeout_s:g}: raise request_ttl_s"
            )
        return self


class LiveConfig(Section):
    """Keys of the deployments' `user_config`: a change reaches running replicas, replaces none and
    reloads nothing."""

    limits: LimitsConfig | None = None
    """Limits of requests to come, for the deployment `Ingress`; None: those of `args`."""

    pipelines: PipelinesConfig | None = None
    """Bounds, targets and delays of autoscaling, for the deployment `Ingress` where `args` have
    autoscaling; None: those of `args`."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Level of this project's log lines in the deployment's processes, for `Pipeline` its workers
    included."""


class StreamsConfig(Section):
    """Times at which the events of a stream are sent. docs/security.md says what this hides, and
    its cost."""

    interval_s: Annotated[PositiveFloat, Field(le=60.0)] | None = None
    """Fixed time between the events of a stream. None: an event for the rounds of each
    `flush_interval_s`, of which size and time tell how much was accepted."""

    tokens_per_event: PositiveInt = 4
    """Tokens of each event but the last, where `interval_s` is set. A stream has at most
    `tokens_per_event` / `interval_s` tokens per second."""

    flush_interval_s: Annotated[NonNegativeFloat, Field(le=1.0)] | None = None
    """Time for which the tokens of a stream gather before they are sent in one event; the first and
    the last ones are sent at once, and a request may set its own. 0: an event for each round. None:
    20 ms, and with more than six streams of a pipeline 3 ms for each, up to 100 ms; also where a
    request has stop strings. Without effect where `interval_s` is set."""


class RouterConfig(Section):
    """The router, the one actor of the control plane."""

    name: str = "eesd-router"
    """Ray name; one router serves all pipelines that name it."""

    namespace: str = "eesd"
    """Ray namespace of that name."""

    checkpoint: HomePath | None = None
    """File of the beliefs, on the router's node or a disk that all nodes share, e.g.
    /var/lib/eesd/beliefs.json; None forgets them with the actor."""

    checkpoint_every_s: PositiveFloat = 5.0
    """Interval of checkpoints: a crash loses what was learnt since the last one."""

    priors: HomePath | None = None
    """File of initial pools, written by `eesd controllers save`. A checkpoint overrides it, unless
    the pools are `pinned`."""

    pinned: bool = False
    """Pools do not change: a request's initial belief depends on no earlier request. `eesd
    controllers pin` and `unpin` do this to a running service."""

    workloads_by_temperature: bool = True
    """Classifies requests that name no workload class by their temperature, too."""

    heartbeat_s: PositiveFloat = 1.0
    """Interval of a pipeline's heartbeats."""

    expiry_s: float = Field(default=5.0, ge=1.5)
    """Silence after which a pipeline is forgotten: at least three heartbeats."""

    @model_validator(mode="after")
    def _a_late_heartbeat_is_no_silence(self) -> Self:
        if self.expiry_s < _MIN_HEARTBEATS * self.heartbeat_s:
            raise ValueError(
                f"expiry_s is {self.expiry_s:g} and heartbeat_s is {self.heartbeat_s:g}: a "
                "pipeline would be forgotten when one or two heartbeats are late; raise expiry_s "
                f"to {_MIN_HEARTBEATS * self.heartbeat_s:g} or more, or lower heartbeat_s to "
                f"{self.expiry_s / _MIN_HEARTBEATS:g} or less"
            )
        return self


class RecorderConfig(Section):
    """Recording of features that verification has computed, for `eesd distill refresh`. Off by
    default.

    A shard holds token ids, hidden states and the target's best tokens of sampled requests: no text
    and no request id, but it is as confidential as the texts."""

    folder: HomePath | None = None
    """Folder on the drafting actors' nodes; None keeps nothing."""

    max_bytes: PositiveInt = 256 * 2**20
    """Size of all shards together; the oldest are deleted first."""

    sample_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the requests that are recorded."""

    top_k: PositiveInt = 16
    """Number of the target's best tokens, kept with their log-probabilities."""


class TelemetryConfig(Section):
    """Traces of requests. docs/observability.md describes them."""

    otlp_endpoint: str | None = None
    """Base URL of an OpenTelemetry collector, e.g. http://localhost:4318."""

    otlp_protocol: OtlpProtocol = "http/protobuf"
    """OTLP over HTTP, or over gRPC (to port 4317 of a collector)."""

    trace_folder: HomePath | None = None
    """Folder for span files, one per process, where there is no collector."""

    sampler: Sampler | None = None
    """OpenTelemetry's sampler, as in OTEL_TRACES_SAMPLER. None: `parentbased_always_on` with a
    collector or folder, else all requests under little load and one in a second otherwise."""

    sampler_arg: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """The ratio of a sampler by ratio, as in OTEL_TRACES_SAMPLER_ARG, e.g. 0.01; None: 1."""

    max_traces_kept: NonNegativeInt = 32
    """Latest traces that each process keeps in memory, for `eesd trace`; 0 keeps none, and without
    a collector and a folder switches tracing off."""

    max_round_spans: PositiveInt = MAX_ROUND_SPANS
    """Rounds of a request that get spans of their own; after these only the 128th, 256th and so on
    do."""


class ServiceConfig(Section):
    """The configuration of one service."""

    engine: EngineConfig
    """Model, cache, scheduler, speculation, parallelism."""

    model_name: str | None = None
    """Name in the API; None takes the model folder's."""

    app_name: str = "eesd"
    """Name of the Serve application."""

    host: str = "127.0.0.1"
    """Address the HTTP service listens on."""

    port: int = Field(default=8000, ge=1, le=65535)
    """Port the HTTP service listens on."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    """Places of Serve's HTTP proxies, if this service starts it: the head, or also every node with
    a replica, for failover of clients."""

    api_key_env: str = "EESD_API_KEY"
    """Environment variable with the key clients must send; unset or empty: no key is asked for."""

    keys_file: HomePath | None = None
    """File of further API keys, with their limits (docs/quotas.md), on every node with an HTTP
    replica; read again when it changes."""

    share_prefix_cache: bool = False
    """Lets prompts reuse prefixes of other API keys in the KV cache: faster with common system
    prompts, but callers can guess at others' prompts (docs/security.md)."""

    allow_no_key: bool = False
    """Allows a host other than loopback without a key."""

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API, e.g. https://example.com; `*`: any."""

    log_folder: HomePath | None = None
    """Folder of `eesd serve` without --address for the logs of its last ten starts; None:
    `$XDG_STATE_HOME/eesd/logs`, `~/.local/state/eesd/logs`, or `/tmp/eesd-UID/state/logs` without a
    home folder."""

    log_format: LogFormat = "text"
    """Format of the log lines of all processes: `json` is one object a line."""

    num_ingresses: PositiveInt = 2
    """HTTP replicas; they hold no state."""

    pipelines: PipelinesConfig = PipelinesConfig()
    placement: PlacementConfig = PlacementConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    limits: LimitsConfig = LimitsConfig()
    streams: StreamsConfig = StreamsConfig()
    router: RouterConfig = RouterConfig()
    recorder: RecorderConfig = RecorderConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _processes_are_possible(self) -> Self:
        placement = self.placement
        if placement.mode == "shared":
            self._require_shareable()
            if self.num_processes == 1:
                return self
        for stage, bundle in (("draft", placement.draft), ("verify", placement.verify)):
            if 0 < (bundle.num_gpus or 0) < 1:
                raise ValueError(
                    f"placement.{stage}.num_gpus is {bundle.num_gpus:g}, and NCCL refuses two "
                    f"ranks of a group on one GPU: drop placement.{stage}.num_gpus, or put both "
                    "stages, of one rank each, into one process with placement.mode: shared"
                )
        return self

    def _require_shareable(self) -> None:
        """Raises ValueError for settings that stages in one process cannot follow."""
        placement, spares = self.placement, self.recovery.spares
        if self.engine.parallel.fallback:
            raise ValueError(
                "engine.parallel.fallback is true with placement.mode: shared, in which verify "
                "rank 0 and its fallback die with the drafting actor: leave one of them out"
            )
        if placement.stages in ("SPREAD", "STRICT_SPREAD"):
            raise ValueError(
                f"placement.stages is {placement.stages} with placement.mode: shared, in which "
                "the stages have a process in common: leave one of them out"
            )
        if self.num_processes == 1 and (placement.verify != BundleConfig() or spares.num_verify):
            raise ValueError(
                "placement.verify or recovery.spares.verify is set with placement.mode: shared, in "
                "which no verify rank has a process of its own: set placement.draft and "
                "recovery.spares.draft"
            )

    @property
    def num_processes(self) -> int:
        """Processes of a pipeline, as configured: the cluster's GPUs may make it one less."""
        return self.engine.parallel.num_ranks - (self.placement.mode == "shared")

    @property
    def served_model_name(self) -> str:
        return self.model_name or self.engine.model.path.resolve().name

    @property
    def telemetry_options(self) -> TelemetryOptions:
        folder, ratio = self.telemetry.trace_folder, self.telemetry.sampler_arg
        return TelemetryOptions(
            model_name=self.served_model_name,
            log_format=self.log_format,
            tracing=TracingOptions(
                endpoint=self.telemetry.otlp_endpoint,
                protocol=self.telemetry.otlp_protocol,
                folder=None if folder is None else str(folder.resolve()),
                sampler=self.telemetry.sampler,
                sampler_arg=None if ratio is None else str(ratio),
                max_traces_kept=self.telemetry.max_traces_kept,
                max_round_spans=self.telemetry.max_round_spans,
            ),
        )


def require_key(config: ServiceConfig, *, has_key: bool) -> None:
    """Raises ConfigError if other hosts could use the service without a key, or keys of a file were
    the only ones."""
    if config.keys_file is not None and not has_key:
        raise ConfigError(
            f"keys_file is {config.keys_file}, and {config.api_key_env} is not set: set it to the "
            "operators' key, with which ids of streams are signed"
        )
    if not (has_key or config.allow_no_key or _is_loopback(config.host)):
        raise ConfigError(
            f"host is {config.host}, which other machines reach, and {config.api_key_env} is not "
            f"set: set {config.api_key_env} to the key that clients must send, listen on "
            "127.0.0.1, or give --allow-no-key (allow_no_key: true)"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_service_config(path: Path) -> dict[str, object]:
    """Reads a YAML file, unchecked: flags may still change it. Raises ConfigError."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: give --config a file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: found {type(tree).__name__}, expected a mapping of sections")
    return tree


def service_config(tree: dict[str, object]) -> ServiceConfig:
    """Checks a tree. Raises ConfigError with the key, what was found and what was expected."""
    try:
        config = ServiceConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(complaint_of(error, ServiceConfig)) from error
    entry_of(config.engine.speculation.controller)
    return config


def live_config(tree: object) -> LiveConfig:
    """Checks a `user_config`; None has the defaults. Raises ConfigError like `service_config`."""
    try:
        return LiveConfig.model_validate({} if tree is None else tree)
    except ValidationError as error:
        raise ConfigError(f"user_config: {complaint_of(error, LiveConfig)}") from error


def require_autoscaled(config: ServiceConfig, live: LiveConfig) -> None:
    """Raises ConfigError for autoscaling settings of a service with a fixed number of pipelines."""
    if live.pipelines is not None and not config.pipelines.is_autoscaled:
        raise ConfigError(
            f"user_config: pipelines: `args` fix the number at {config.pipelines.min_count}: "
            "change num_replicas of the deployment Pipeline, or let max_count in `args` be above "
            "min_count"
        )
