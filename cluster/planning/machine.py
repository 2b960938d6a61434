"""The machine of a forecast: a rank's arithmetic, the host's work, the network."""

from dataclasses import dataclass, field

from cluster.planning.network import Network
from cluster.planning.presets import GPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """Measured attention of one layer; all but the call is for each query head of a rank."""

    call_s: float = 0.0
    request_s: float = 0.0
    row_s: float = 0.0
    key_s: float = 0.0
    """Seconds of each row and token of its context."""

    def seconds(self, *, num_heads: float, requests: int, rows: int, context: int) -> float:
        of_head_s = requests * self.request_s + rows * (self.row_s + context * self.key_s)
        return self.call_s + num_heads * of_head_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Work of one rank and its speed: a product takes the time to read its weights or the time to
    multiply its rows, whichever is longer."""

    memory_bytes_per_s: float = GPUS["h100"].memory_bytes_per_s
    flops_per_s: float = GPUS["h100"].flops_per_s
    efficiency: float = 1.0
    """Share of both peaks that kernels reach."""
    product_s: float = 0.0
    """Seconds of each product in addition to that: its call."""
    attention: AttentionTimes | None = None
    """None: attention takes the time to read keys and values."""
    layer_s: float = 0.0
    """Seconds of each layer, in every rank in full: norms, residual sums, calls."""
    row_s: float = 0.0
    """The same for each row."""

    def product_of(self, weights_bytes: float, *, flops: float) -> float:
        """Returns the seconds of one product."""
        read_s = weights_bytes / self.memory_bytes_per_s
        multiply_s = flops / self.flops_per_s
        return self.product_s + max(read_s, multiply_s) / self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Host time that no stage hides: CPU seconds of rounds without a model, from
    docs/benchmarks/2026-11-25-host-2cpu.json, at 1 and 64 requests."""

    step_s: float = 0.13e-3
    """Seconds of one drafted token of a batch: the loop returns to the host after each."""
    step_request_s: float = 20e-6
    """The same for each request."""
    first_s: float = 0.0
    """The first drafted token in addition: the exit head also reads the known rows."""
    prefix_s: float = 0.1e-3
    """Seconds of a round for the known rows in the draft stage."""
    prefix_request_s: float = 10e-6
    round_s: float = 84e-6
    """Plan, header, encoding, commit."""
    round_request_s: float = 17.5e-6
    round_row_s: float = 0.0
    verify_s: float = 78e-6
    """Seconds in each verify rank: decoding, the plan of the rows, the rules of sampling."""
    verify_request_s: float = 7.6e-6
    queued_sum_s: float = 80e-6
    """Queueing one sum of a group over nodes, and the piece of a CUDA graph before it: the middle
    of 50 to 106 us for a call of NCCL from Python, on an H200's host (8 to 17 ms of 160 sums)."""
    hop_s: float = 0.12e-3
    """A message between two processes, without its bytes, within a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs or CPUs of a pipeline."""

    arithmetic: Arithmetic = Arithmetic()
    host: HostTimes = HostTimes()
    network: Network = field(default_factory=Network)
    memory_bytes: float | None = None
    """Memory of one rank, for weights, KV pages and activations; None: not checked."""
    draft_sum_s: float | None = None
    """Seconds of one all-reduce among draft ranks, of any size; None: as the network says."""
    verify_sum_s: float | None = None
    """The same among verify ranks and among the ranks of plain decoding."""
