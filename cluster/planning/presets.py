"""Figures of GPUs and links from data sheets, and the dimensions of some models, by name.

Imports nothing heavy: the names are options of `eesd plan`.
"""

from dataclasses import dataclass
from typing import Any, Literal

GpuName = Literal["a100-40", "a100-80", "h100", "h200"]
LinkName = Literal["nvlink", "pcie", "infiniband", "infiniband-hdr", "ethernet-25"]
ShapeName = Literal["llama-3-8b", "llama-2-13b", "qwen3-14b", "codellama-34b", "llama-3-70b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Peaks of one GPU."""

    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    """Dense bfloat16."""
    nvlink_bytes_per_s: float
    """Bandwidth in one direction, all links together."""


# NVIDIA's data sheets of the SXM boards; they give bfloat16 with sparsity, which is twice the dense
# peak, and NVLink as the sum of both directions.
GPUS: dict[GpuName, Gpu] = {
    "a100-40": Gpu(
        memory_bytes=40e9,
        memory_bytes_per_s=1.555e12,
        flops_per_s=3.12e14,
        nvlink_bytes_per_s=300e9,
    ),
    "a100-80": Gpu(
        memory_bytes=80e9,
        memory_bytes_per_s=2.039e12,
        flops_per_s=3.12e14,
        nvlink_bytes_per_s=300e9,
    ),
    "h100": Gpu(
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        flops_per_s=9.89e14,
        nvlink_bytes_per_s=450e9,
    ),
    "h200": Gpu(
        memory_bytes=141e9,
        memory_bytes_per_s=4.8e12,
        flops_per_s=9.89e14,
        nvlink_bytes_per_s=450e9,
    ),
}

USUAL_EFFICIENCY = 0.7
"""Share of the peaks that decoding reaches: gpt-fast's README has 1,397 of 2,039 GB/s for
Llama-2-7B in bfloat16 on an A100-80."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between two ranks."""

    hop_s: float
    """Seconds of one step of a collective, or of one message."""
    bytes_per_s: float
    """Bandwidth of one rank in one direction."""
    is_of_node: bool = False
    """True if all ranks of a node share it."""


COLLECTIVE_S = 10e-6
"""Start of a collective: `baseLat` of ring LL128 in NCCL's src/graph/tuning.cc, which also has the
steps of NVLink (1.9 us), PCIe (2.5 us) and InfiniBand (4 us) below."""

LINKS: dict[LinkName, Link] = {
    # The bandwidth is the GPU's.
    "nvlink": Link(hop_s=1.9e-6, bytes_per_s=450e9),
    # PCIe 4.0 x16.
    "pcie": Link(hop_s=2.5e-6, bytes_per_s=32e9),
    # ConnectX-7 (NDR, 400 Gb/s) and ConnectX-6 (HDR, 200 Gb/s), one for each GPU.
    "infiniband": Link(hop_s=4e-6, bytes_per_s=50e9),
    "infiniband-hdr": Link(hop_s=4e-6, bytes_per_s=25e9),
    # One 25 Gb/s port for each node. NCCL has no figure for TCP sockets: 30 us is the usual half of
    # a ping-pong over kernel TCP within a rack.
    "ethernet-25": Link(hop_s=30e-6, bytes_per_s=3.125e9, is_of_node=True),
}


SHAPES: dict[ShapeName, dict[str, Any]] = {
    # From config.json as published with these models; all have 16-bit weights.
    "llama-3-8b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_positions": 8192,
    },
    "llama-2-13b": {
        "num_layers": 40,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_heads": 40,
        "num_kv_heads": 40,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_positions": 4096,
    },
    "qwen3-14b": {
        "num_layers": 40,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_heads": 40,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_positions": 40960,
    },
    "codellama-34b": {
        "num_layers": 48,
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_positions": 16384,
    },
    "llama-3-70b": {
        "num_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_positions": 8192,
    },
}
