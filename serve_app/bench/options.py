"""Options of the benchmarks that need the service; a docstring is the help of its command.

Imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Annotated

from eesd_dist.bench.options import (
    SHIPPED_PROMPTS,
    ExactOptions,
    Json,
    Model,
    Prompts,
    Quick,
)
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.checks import require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Compares streams while processes die and links are cut.

    A real service is started and asked the same seeded requests twice over HTTP: undisturbed, and
    while a seeded schedule kills workers, replicas of pipelines and ingress, HTTP proxies and the
    router, makes workers stand still and cuts connections, some of it before recovery from the last
    fault.

    recovery_p50_s and recovery_p95_s are over kills: seconds from the kill to the next token of the
    slowest stream of that pipeline; first_stream_* are those of its quickest. Router kills are in
    no recovery time: no stream waits for a router. noticed_* are seconds until the pipeline named
    the trouble. alone_* leave out kills after which a stream also waited for the recovery from
    another kill, or for a killed ingress or proxy; turned_away counts the errors that clients were
    answered while those were replaced. A kill after which no stream of its pipeline continued
    counts as infinite.

    Exit status 1 when a stream was lost, repeated or changed, when nothing was killed, when a kill
    went unnoticed, and when the schedule ended early because the service had not recovered in time.
    """

    quick: Quick = False
    json: Json = False
    seed: Annotated[int, "of requests and schedule"] = 0
    requests: Annotated[int | None, "of each run (200; 40 with --quick)"] = None
    max_tokens: Annotated[int, "of the longest requests"] = 192
    concurrency: Annotated[int, "streams at the same time"] = 8
    prompts: Prompts = SHIPPED_PROMPTS
    kills: Annotated[int | None, "maximum number of faults"] = None
    kinds: Annotated[tuple[str, ...], "kinds of faults (all that this machine allows)"] = ()
    gap_s: Annotated[float, "mean time between recovery and the next fault"] = 2.0
    at_once: Annotated[float, "share of faults that do not wait for recovery"] = 0.25
    model: Model = BUNDLED_MODEL
    verify_tp: Annotated[int, "ranks of the verify stage"] = 2
    pipelines: Annotated[int, "number of pipelines"] = 1
    deadline_s: Annotated[float, "limit of every wait between ranks"] = 20.0
    port: Annotated[int | None, "of the service (a free one)"] = None
    set: Annotated[tuple[str, ...], "--set KEY=VALUE: any configuration key; may be repeated"] = ()
    address: Annotated[
        str | None, "HOST:PORT of a Ray cluster to join; run this on the host of its head"
    ] = None
    kill: Annotated[str | None, "--kill CMD: {host} {pid} {signal}; signals a process there"] = None
    link_down: Annotated[str | None, "--link-down CMD: {host}; cuts its link"] = None
    link_up: Annotated[str | None, "--link-up CMD: {host}; restores the link"] = None
    cut_s: Annotated[float, "how long a link stays down"] = 8.0

    def __post_init__(self) -> None:
        require_positive(self, "requests", "max_tokens", "concurrency", "kills", "port")
        require_positive(self, "verify_tp", "pipelines", "deadline_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOverActorsOptions:
    """Compares texts with and without speculation.

    Every controller with chains, static and dynamic trees, temperatures 0, 0.7 and 1.0 with top_p,
    penalties and logit_bias, batches of 1, 4 and 16, in one process and over actors with one and
    two verify ranks and one and two draft ranks; float32, and bfloat16 with `numerics: invariant`.
    What bfloat16 gives with `numerics: fast` is printed as well. With --address all of it runs on
    that cluster, spread over its nodes, four verify ranks too, and nothing in one process. Exit
    status 1 when a promised equality fails.

    With --random SEED, engines, requests and troubles are drawn instead: `eesd bench exact --random
    1 --help`.
    """

    exact: ExactOptions
    address: Annotated[str | None, "Ray cluster to compare on; else Ray is started here"] = None
