"""Options of `eesd plan`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from cluster.planning.heads import USUAL_COVERAGE, AcceptanceAt
from cluster.planning.machine import Arithmetic, Machine
from cluster.planning.memory import USUAL_SHARE
from cluster.planning.network import Network
from cluster.planning.presets import (
    GPUS,
    LINKS,
    USUAL_EFFICIENCY,
    GpuName,
    Link,
    LinkName,
    ShapeName,
)
from cluster.planning.shapes import Load
from eesd_dist.errors import ConfigError

_LOAD = Load()
_SMALLEST, _LARGEST = 1e-9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Predicts whether speculation would pay on given machines.

    With --exit-layer it judges one split; without, it searches exit layer, ranks of both stages,
    head and draft length. Plain decoding gets all GPUs of the nodes. A layer takes the time to read
    its weights and KV, or the time to multiply its rows, whichever is longer; measured costs, links
    and acceptance are used where given, and the verdict says where the acceptance is assumed. An
    option that would have no effect is refused.
    """

    model: Annotated[Path | None, "folder of the target; no weights are read"] = None
    shape: Annotated[ShapeName | None, "a well-known target instead of --model"] = None
    exit_layer: Annotated[int | None, "layers of the draft stage (searched)"] = None
    search: Annotated[bool, "search, with --exit-layer only that one"] = False
    draft_tp: Annotated[int | None, "ranks of the draft stage, without search (1)"] = None
    verify_tp: Annotated[int | None, "ranks of the verify stage, without search (1)"] = None
    shared_gpu: Annotated[bool, "placement.mode: shared, without search"] = False
    fallback: Annotated[bool, "verify ranks also load the draft ranks' layers"] = False
    on_cpu: Annotated[bool, "ranks on CPUs"] = False
    kv_cache_dtype: Annotated[
        Literal["float32", "bfloat16"] | None, "type of stored keys and values on CPUs (float32)"
    ] = None
    draft_vocab_size: Annotated[int | None, "tokens of a truncated exit head"] = None
    draft_coverage: Annotated[
        float | None,
        f"share of the target's tokens in a truncated draft vocabulary ({USUAL_COVERAGE}, assumed)",
    ] = None
    gpu: Annotated[GpuName, "data-sheet figures of a GPU"] = "h100"
    gpus_per_node: Annotated[int, "GPUs of a node, or ranks where these are on CPUs"] = 8
    nodes: Annotated[int | None, "nodes (1 for a search, else as many as the split needs)"] = None
    gpu_memory_gb: Annotated[float | None, "memory of a GPU, GB (--gpu's)"] = None
    gpu_bandwidth_gbps: Annotated[float | None, "memory bandwidth, GB/s (--gpu's)"] = None
    gpu_tflops: Annotated[float | None, "dense peak (--gpu's)"] = None
    efficiency: Annotated[
        float | None, f"share of both peaks that kernels reach ({USUAL_EFFICIENCY})"
    ] = None
    intra: Annotated[LinkName, "link inside a node"] = "nvlink"
    inter: Annotated[LinkName, "link between nodes"] = "infiniband"
    intra_hop_us: Annotated[float | None, "one step of a collective (--intra's)"] = None
    intra_bandwidth_gbps: Annotated[float | None, "of a rank, GB/s (--intra's)"] = None
    inter_hop_us: Annotated[float | None, "one step of a collective (--inter's)"] = None
    inter_bandwidth_gbps: Annotated[float | None, "of a rank, GB/s (--inter's)"] = None
    draft_all_reduce_us: Annotated[float | None, "one all-reduce among draft ranks"] = None
    verify_all_reduce_us: Annotated[float | None, "one all-reduce among verify ranks"] = None
    links: Annotated[Path | None, "measured links: the JSON of `eesd preflight`"] = None
    costs: Annotated[Path | None, "measured costs: the JSON of `eesd bench costs`"] = None
    requests: Annotated[int, "requests in flight"] = _LOAD.num_requests
    context: Annotated[int, "tokens of context per request"] = _LOAD.context_tokens
    head: Annotated[
        Path | None, "exit head with an evaluation.json (--model's exit_head, if it has one)"
    ] = None
    temperature: Annotated[float | None, "temperature at which the head was evaluated (1)"] = None
    acceptance: Annotated[
        float | None,
        "chance that a draft token is accepted, at every exit layer (of --head or --costs, else "
        "assumed, rising with the exit layer)",
    ] = None
    acceptance_at: Annotated[
        tuple[AcceptanceAt, ...],
        Option(
            "--acceptance-at",
            parser=AcceptanceAt.parse,
            metavar="N=P",
            help="acceptance of a head at exit layer N; may be repeated, others are interpolated",
        ),
    ] = ()
    max_draft_tokens: Annotated[int, "maximum draft length"] = _LOAD.max_draft_tokens
    json: Annotated[bool, "print one JSON object"] = False

    @property
    def searches(self) -> bool:
        return self.exit_layer is None or self.search

    def require_effect(self) -> None:
        """Raises ConfigError for an option that would be ignored, with the one that causes it."""
        for names, is_ignored, advice in (
            (
                ("draft_tp", "verify_tp", "shared_gpu", "fallback"),
                self.searches,
                "a search chooses the ranks of both stages: give --exit-layer without --search",
            ),
            (
                ("draft_coverage",),
                not self.searches and self.draft_vocab_size is None,
                "this split has the full draft vocabulary: give --draft-vocab-size",
            ),
            (
                ("draft_all_reduce_us",),
                not self.searches and self.draft_tp in (None, 1),
                "a single draft rank sums with no other: raise --draft-tp",
            ),
            (
                ("gpu_bandwidth_gbps", "gpu_tflops", "efficiency"),
                self.costs is not None,
                "--costs has measured times: leave one of them out",
            ),
            (
                ("acceptance",),
                bool(self.acceptance_at),
                "--acceptance-at has those of each exit layer: leave one of them out",
            ),
            (
                ("head", "temperature"),
                self.acceptance is not None or bool(self.acceptance_at),
                "--acceptance and --acceptance-at replace what was measured: leave one of them out",
            ),
            (
                ("head", "temperature"),
                self.model is None,
                "a head belongs to a model: give --model",
            ),
            (("shared_gpu",), self.on_cpu, "--on-cpu has no GPU: leave one of them out"),
            (
                ("kv_cache_dtype",),
                not self.on_cpu,
                "a GPU stores keys and values in the type of the weights: leave it out",
            ),
        ):
            for name in names:
                value = getattr(self, name)
                if is_ignored and value is not None and value is not False:
                    option = _flag(name) if value is True else f"{_flag(name)} {value}"
                    raise ConfigError(f"found {option}, which would have no effect: {advice}")

    @property
    def machine(self) -> Machine:
        """The machine without measured figures. Raises ConfigError for a figure that cannot be."""
        for name in ("nodes", "gpus_per_node", "draft_tp", "verify_tp"):
            number = getattr(self, name)
            if number is not None and not 1 <= number <= 100_000:
                raise ConfigError(f"{_flag(name)} {number}: expected a whole number from 1")
        gpu = GPUS[self.gpu]
        memory_gb = self._figure("gpu_memory_gb", gpu.memory_bytes / 1e9)
        has_memory = self.gpu_memory_gb is not None or not self.on_cpu
        efficiency = self._figure("efficiency", USUAL_EFFICIENCY)
        if efficiency > 1.0:
            raise ConfigError(f"--efficiency {self.efficiency}: expected a share, up to 1")
        bandwidth_gbps = self._figure("gpu_bandwidth_gbps", gpu.memory_bytes_per_s / 1e9)
        return Machine(
            arithmetic=Arithmetic(
                memory_bytes_per_s=bandwidth_gbps * 1e9,
                flops_per_s=self._figure("gpu_tflops", gpu.flops_per_s / 1e12) * 1e12,
                efficiency=efficiency,
            ),
            network=Network(
                intra=self._link("intra", self.intra, nvlink_bytes_per_s=gpu.nvlink_bytes_per_s),
                inter=self._link("inter", self.inter, nvlink_bytes_per_s=gpu.nvlink_bytes_per_s),
                gpus_per_node=self.gpus_per_node,
            ),
            memory_bytes=USUAL_SHARE * memory_gb * 1e9 if has_memory else None,
            draft_sum_s=self._fixed_sum_s("draft_all_reduce_us"),
            verify_sum_s=self._fixed_sum_s("verify_all_reduce_us"),
        )

    def _link(self, side: str, name: LinkName, *, nvlink_bytes_per_s: float) -> Link:
        link = LINKS[name]
        if name == "nvlink":
            link = replace(link, bytes_per_s=nvlink_bytes_per_s)
        hop_us = self._figure(f"{side}_hop_us", link.hop_s * 1e6, or_zero=True)
        gbps = self._figure(f"{side}_bandwidth_gbps", link.bytes_per_s / 1e9)
        return replace(link, hop_s=hop_us * 1e-6, bytes_per_s=gbps * 1e9)

    def _fixed_sum_s(self, name: str) -> float | None:
        if getattr(self, name) is None:
            return None
        return self._figure(name, 0.0, or_zero=True) * 1e-6

    def _figure(self, name: str, usual: float, *, or_zero: bool = False) -> float:
        """Returns the option's figure, or the usual one. Raises ConfigError."""
        figure = getattr(self, name)
        if figure is None:
            return usual
        if or_zero and figure == 0.0:
            return 0.0
        if not (isfinite(figure) and _SMALLEST <= figure <= _LARGEST):
            raise ConfigError(
                f"{_flag(name)} {figure}: expected a number from {_SMALLEST:g} to {_LARGEST:g}"
                f"{', or 0' if or_zero else ''}"
            )
        return float(figure)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
