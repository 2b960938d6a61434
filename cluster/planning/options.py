"""Options of `eesd plan`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated

from typer import Option

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
from cluster.planning.shapes import AcceptanceAt, Load
from eesd_dist.errors import ConfigError

_LOAD = Load()
_SMALLEST, _LARGEST = 1e-9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Predicts whether speculation would pay on given machines.

    With --exit-layer it judges one split; without, it searches exit layer, ranks of both stages,
    head and draft length. Plain decoding gets as many GPUs, draft ranks included. A layer takes the
    time to read its weights and KV, or the time to multiply its rows, whichever is longer; measured
    costs and links are used where given. The acceptance is an option.
    """

    config: Annotated[Path | None, "config.json of the target"] = None
    shape: Annotated[ShapeName | None, "a well-known target instead of --config"] = None
    exit_layer: Annotated[int | None, "layers of the draft stage (searched)"] = None
    search: Annotated[bool, "search, with --exit-layer only that one"] = False
    draft_tp: Annotated[int, "ranks of the draft stage, without search"] = 1
    verify_tp: Annotated[int, "ranks of the verify stage, without search"] = 1
    fallback: Annotated[bool, "verify ranks also load the draft ranks' layers"] = False
    on_cpu: Annotated[bool, "ranks on CPUs, which keep keys and values in float32"] = False
    draft_vocab_size: Annotated[int | None, "tokens of a truncated exit head"] = None
    draft_coverage: Annotated[
        float, "share of the target's tokens in a truncated draft vocabulary (assumed)"
    ] = 0.95
    gpu: Annotated[GpuName, "data-sheet figures of a GPU"] = "h100"
    gpus_per_node: Annotated[int, "GPUs of a node"] = 8
    nodes: Annotated[int, "nodes, for a search"] = 1
    gpu_memory_gb: Annotated[float | None, "memory of a GPU, GB (--gpu's)"] = None
    gpu_bandwidth_gbps: Annotated[float | None, "memory bandwidth, GB/s (--gpu's)"] = None
    gpu_tflops: Annotated[float | None, "dense peak (--gpu's)"] = None
    efficiency: Annotated[float, "share of both peaks that kernels reach"] = USUAL_EFFICIENCY
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
    acceptance: Annotated[
        float | None, "chance that a draft token is accepted (measured with --costs, else 0.8)"
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
    def num_gpus(self) -> int:
        """All GPUs of the nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def machine(self) -> Machine:
        """The machine without measured figures. Raises ConfigError for a figure that cannot be."""
        for name in ("nodes", "gpus_per_node", "draft_tp", "verify_tp"):
            found = getattr(self, name)
            if not 1 <= found <= 100_000:
                raise ConfigError(f"{_flag(name)} {found}: expected a whole number from 1")
        gpu = GPUS[self.gpu]
        memory_gb = self._figure("gpu_memory_gb", gpu.memory_bytes / 1e9)
        has_memory = self.gpu_memory_gb is not None or not self.on_cpu
        if not self.efficiency <= 1.0:
            raise ConfigError(f"--efficiency {self.efficiency}: expected a share, up to 1")
        bandwidth_gbps = self._figure("gpu_bandwidth_gbps", gpu.memory_bytes_per_s / 1e9)
        return Machine(
            arithmetic=Arithmetic(
                memory_bytes_per_s=bandwidth_gbps * 1e9,
                flops_per_s=self._figure("gpu_tflops", gpu.flops_per_s / 1e12) * 1e12,
                efficiency=self._figure("efficiency", USUAL_EFFICIENCY),
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
        found = getattr(self, name)
        if found is None:
            return usual
        if or_zero and found == 0.0:
            return 0.0
        if not (isfinite(found) and _SMALLEST <= found <= _LARGEST):
            raise ConfigError(
                f"{_flag(name)} {found}: expected a number from {_SMALLEST:g} to {_LARGEST:g}"
                f"{', or 0' if or_zero else ''}"
            )
        return float(found)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
