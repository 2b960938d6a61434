"""Options of benchmarks that need the engine only, and their default model and prompts; docstrings
are the help texts of the commands.

Imports nothing heavy.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.types import Device, DType, DTypeSetting, KvCacheDType, Numerics, StopRule

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""JSON lines, with a workload each."""

Model = Annotated[Path, "folder of the target model (the bundled one)"]
Head = Annotated[Path | None, "folder of the exit head (MODEL/exit_head)"]
Prompts = Annotated[Path, "prompts, JSON lines (the bundled ones)"]
KvCache = Annotated[KvCacheDType, "type of stored keys and values"]
Quick = Annotated[bool, "a smaller run"]
Json = Annotated[bool, "print only the last line, one JSON object"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Number of ranks of each stage."""

    verify_ranks: int
    draft_ranks: int = 1

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parses `4`, or `2x2`: verify ranks, then draft ranks."""
        match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
        if match is None:
            raise ValueError(
                f"found {text!r}, expected verify ranks or verify x draft ranks, like 4 or 2x2"
            )
        return cls(verify_ranks=int(match[1]), draft_ranks=int(match[2] or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Speed of every controller, one request at a time.

    Compared with transformers, in its fastest type, and plain decoding: one process, the same
    prompts, greedy. Every prompt runs on all variants before the next one, so that a slower machine
    affects all of them. Texts that differ from plain decoding are counted.
    """

    model: Model = BUNDLED_MODEL
    head: Head = None
    prompts: Prompts = SHIPPED_PROMPTS
    limit: Annotated[int | None, "number of prompts (all)"] = None
    max_tokens: Annotated[int, "length of each text"] = 128
    repeats: Annotated[int, "runs of every variant"] = 3
    dtype: Annotated[DTypeSetting, "type of the weights"] = "auto"
    numerics: Annotated[Numerics, "invariant: bit-for-bit reproducible"] = "invariant"
    kv_cache_dtype: KvCache = "auto"
    stop_rule: Annotated[StopRule, "when the goodput controller stops drafting"] = "auto"
    threads: Annotated[int, "CPU threads"] = 1
    device: Annotated[Device, "where to compute, transformers too"] = "auto"
    fixed: Annotated[tuple[int, ...], "fixed draft lengths"] = (1, 2, 3, 4, 5, 6, 7, 8)
    skip_transformers: Annotated[bool, "time this engine alone"] = False
    quick: Annotated[bool, "under three minutes"] = False
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineOptions:
    """Latency and throughput of a running service under load.

    Open loop: requests arrive by a seeded Poisson process, independent of the end of earlier ones.
    Load c is c requests in the time that one request takes alone with speculation off. Every load
    runs with speculation off and on, with the same prompts.
    """

    url: Annotated[str, "the running service"] = "http://127.0.0.1:8000"
    prompts: Prompts = SHIPPED_PROMPTS
    loads: Annotated[tuple[int, ...], "requests per time of one alone"] = (1, 2, 4, 8, 16)
    per_load: Annotated[int, "requests at each load"] = 24
    max_tokens: Annotated[int, "length of each text"] = 96
    seed: Annotated[int, "seed of the arrivals"] = 0
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOptions:
    model: Model = BUNDLED_MODEL
    head: Head = None
    prompts: Prompts = SHIPPED_PROMPTS
    tokens: Annotated[int, "approximate tokens to compare"] = 20_000
    topology: Annotated[
        tuple[Topology, ...],
        Option(
            "--topology",
            parser=Topology.parse,
            metavar="V[xD]",
            help="verify ranks, and draft ranks if more than one; may be repeated",
        ),
    ] = ()
    kv_cache_dtype: KvCache = "auto"
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedOptions:
    """Tokens per second of many requests at once.

    Requests of a batch start together and have the same number of tokens. Plain decoding,
    speculation, prompt lookup alone and transformers' batched generation take turns, on the same
    weights and with the same sampling parameters; transformers in its fastest type, which is
    measured first and named. Every run has the prompts that follow those of the run before. With
    --url a running service takes its turns, too, as its clients see it.
    """

    model: Model = BUNDLED_MODEL
    url: Annotated[str | None, "a running service of the same model"] = None
    prompts: Prompts = SHIPPED_PROMPTS
    batches: Annotated[tuple[int, ...], "requests at once"] = (1, 8, 32, 64)
    prompt_tokens: Annotated[
        int | None, "length of every prompt, made of several if needed (as they are)"
    ] = None
    dtype: Annotated[DTypeSetting, "type of this engine's weights"] = "auto"
    kv_cache_dtype: KvCache = "auto"
    device: Annotated[Device, "where to compute, transformers too"] = "auto"
    skip_transformers: Annotated[bool, "time this engine alone"] = False
    max_tokens: Annotated[int, "length of each text"] = 64
    temperature: Annotated[float, "0: greedy"] = 0.0
    top_p: Annotated[float, "1: all tokens"] = 1.0
    top_k: Annotated[int, "0: all tokens"] = 0
    min_p: Annotated[float, "0: all tokens"] = 0.0
    repetition_penalty: Annotated[float, "1: none"] = 1.0
    repeats: Annotated[int, "runs of every variant"] = 3
    json: Json = False

    @property
    def sampling(self) -> dict[str, float]:
        """Parameters of each text, by the names that requests, bodies and transformers have."""
        names = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Controllers against the best fixed draft length.

    Classes are the classes of the prompts at several temperatures. A recording of the drafts from
    every position allows an exact replay of every controller; then the variants alternate on the
    real engine, and every text is compared with plain decoding. The best fixed length is chosen in
    hindsight, by the figures it is then compared with.
    """

    model: Model = BUNDLED_MODEL
    head: Head = None
    prompts: Prompts = SHIPPED_PROMPTS
    temperatures: Annotated[tuple[float, ...], "temperatures of each class"] = (0.0, 0.8, 1.2)
    max_tokens: Annotated[int | None, "length of each text"] = None
    max_draft_tokens: Annotated[int, "maximum draft length"] = 8
    dtype: Annotated[DTypeSetting, "type of the weights"] = "auto"
    kv_cache_dtype: KvCache = "auto"
    device: Annotated[Device, "where to compute"] = "auto"
    threads: Annotated[int, "CPU threads"] = 1
    clock: Annotated[
        Literal["wall", "cpu"], "cpu: seconds of this process, for a busy machine; on the CPU only"
    ] = "wall"
    seed: Annotated[int, "seed of requests and noise"] = 0
    only: Annotated[
        Literal["replay", "live", "contexts"] | None,
        "one section; contexts: drafting over plain decoding, by context and load",
    ] = None
    contexts: Annotated[tuple[int, ...], "tokens of context"] = (128, 512, 2048, 8192)
    loads: Annotated[tuple[int, ...], "requests at a time, by context"] = (1, 4, 16, 64)
    useless_head: Annotated[bool, "contexts: an exit head of random weights instead"] = False
    record: Annotated[Path | None, "write the recorded traces to this file"] = None
    traces: Annotated[Path | None, "replay the traces of this file"] = None
    cost: Annotated[Path | None, "cost model, JSON; measured if not given"] = None
    quick: Annotated[bool, "under four minutes on two cores"] = False
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsOptions:
    """Measures the costs of stages: input of `eesd plan`.

    Runs real rounds of one pipeline in processes of this machine, one thread a rank: the drafting
    process and the verify ranks, over links, without overlap. Write the
    last line to a file for `eesd plan --costs`.
    """

    model: Model = BUNDLED_MODEL
    head: Head = None
    prompts: Prompts = SHIPPED_PROMPTS
    batches: Annotated[tuple[int, ...], "requests in a round"] = (1, 8)
    lengths: Annotated[tuple[int, ...], "draft lengths"] = (0, 1, 2, 4, 8)
    verify_tp: Annotated[int, "ranks of the verify stage"] = 1
    num_prompts: Annotated[int, "prompts that each batch size runs"] = 16
    max_tokens: Annotated[int, "length of each text"] = 64
    repeats: Annotated[int, "runs of every batch and length"] = 3
    json: Json = False


DEFAULT_FUZZ_TOKENS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzOptions:
    """Compares texts of random engines, requests and faults.

    Each engine is drawn from the seed and its number: controllers, trees, batch, pages,
    microbatches, ranks, links; requests with every sampling parameter; arrivals, aborts, lost
    stages, migrations. Ranks are threads, so that a case repeats exactly, or processes. Each text,
    its finish reason and its log-probabilities are compared with those of the same request alone,
    with speculation off. A failing engine is written to a case file that --case replays. Exit
    status 1 if anything differs.
    """

    random: Annotated[int | None, "seed of all random choices"] = None
    model: Annotated[tuple[Path, ...], "folder of a model; may be repeated"] = ()
    head: Annotated[Path | None, "exit head of the first model (MODEL/exit_head)"] = None
    random_models: Annotated[int, "number of additional models of odd shapes"] = 0
    prompts: Annotated[Path | None, "JSON lines, for models with a tokenizer (bundled)"] = None
    device: Annotated[Device, "where to compute"] = "auto"
    dtype: Annotated[tuple[DType, ...], "only these types (all)"] = ()
    ranks: Annotated[int, "fewest verify ranks of an engine"] = 1
    processes: Annotated[
        bool, "ranks as processes over links, killed and stopped; timing does not repeat"
    ] = False
    tokens: Annotated[int | None, f"approximate tokens to compare ({DEFAULT_FUZZ_TOKENS})"] = None
    minutes: Annotated[float | None, "time limit; with --tokens, whichever comes first"] = None
    state: Annotated[Path | None, "state file; the same command continues from it"] = None
    case: Annotated[Path | None, "replay only this case file"] = None
    case_folder: Annotated[Path, "folder for failing cases"] = Path()
    max_failures: Annotated[int, "stop after this many failing engines"] = 3
    json: Json = False
