"""Options of `eesd plan`; the docstring is the help of the command.

Imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cluster.planning.shapes import Load, Machine

_MACHINE, _LOAD = Machine(), Load()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Predicts whether speculation would pay on given machines.

    A layer takes the time to read its weights and KV, or the time to multiply its rows, whichever
    is longer. Nothing is measured: the acceptance is an option, and the acceptance at which
    speculation breaks even is printed.
    """

    config: Annotated[Path, "config.json of the target"]
    exit_layer: Annotated[int, "layers of the draft stage"]
    draft_tp: Annotated[int, "ranks of the draft stage"] = 1
    verify_tp: Annotated[int, "ranks of the verify stage"] = 1
    fallback: Annotated[bool, "verify ranks also load the draft ranks' layers"] = False
    on_cpu: Annotated[bool, "ranks on CPUs, which keep keys and values in float32"] = False
    draft_vocab_size: Annotated[int | None, "tokens of a truncated exit head"] = None
    gpu_bandwidth_gbps: Annotated[float, "memory bandwidth of a GPU, GB/s"] = (
        _MACHINE.memory_bytes_per_s / 1e9
    )
    gpu_tflops: Annotated[float, "peak of a GPU"] = _MACHINE.flops_per_s / 1e12
    efficiency: Annotated[float, "share of both peaks that kernels reach"] = _MACHINE.efficiency
    link_latency_us: Annotated[float, "one way, draft to verify"] = _MACHINE.link_latency_s * 1e6
    link_bandwidth_gbps: Annotated[float, "draft to verify, GB/s"] = _MACHINE.link_bytes_per_s / 1e9
    draft_all_reduce_us: Annotated[float, "one all-reduce among draft ranks"] = 0.0
    verify_all_reduce_us: Annotated[float, "one all-reduce among verify ranks"] = 0.0
    requests: Annotated[int, "requests in flight"] = _LOAD.num_requests
    context: Annotated[int, "tokens of context per request"] = _LOAD.context_tokens
    acceptance: Annotated[float, "chance that a draft token is accepted"] = _LOAD.acceptance
    max_draft_tokens: Annotated[int, "maximum draft length"] = _LOAD.max_draft_tokens

    @property
    def machine(self) -> Machine:
        return Machine(
            memory_bytes_per_s=self.gpu_bandwidth_gbps * 1e9,
            flops_per_s=self.gpu_tflops * 1e12,
            efficiency=self.efficiency,
            link_latency_s=self.link_latency_us * 1e-6,
            link_bytes_per_s=self.link_bandwidth_gbps * 1e9,
            draft_all_reduce_s=self.draft_all_reduce_us * 1e-6,
            verify_all_reduce_s=self.verify_all_reduce_us * 1e-6,
        )
