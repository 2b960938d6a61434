"""Measures the room of one rank for KV pages, once its weights are in memory.

On a CPU the room is the configured budget: free memory of a host says little, since other ranks and
the page cache share it. On a GPU it is what the weights have left of the rank's share.
"""

from pathlib import Path

import torch

from eesd_dist.backends.api import engine_on
from eesd_dist.config import CacheConfig, EngineConfig
from eesd_dist.model.kernels import TORCH_DTYPES
from eesd_dist.model.layers.layer import LayerWeights
from eesd_dist.model.layers.paged_layers import LoadedLayers
from eesd_dist.model.parallel import Shard
from eesd_dist.model.rank_memory import (
    CPU_BUDGET_BYTES,
    activation_bytes,
    gpu_budget_bytes,
    held_bytes,
    logits_block,
)
from eesd_dist.model.span import read_embedding
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import Checkpoint, Headers
from eesd_dist.schedule.kv_pages import KvRoom
from eesd_dist.types import DType


def kv_room(
    config: EngineConfig, layers: LoadedLayers, *, page_bytes: int, deferred_bytes: int = 0
) -> KvRoom:
    """Returns the room of the process that has loaded these layers.

    `page_bytes`: one page of all layers that it keeps; `deferred_bytes`: what else is allocated
    later, such as weights of a fallback.
    """
    reserved = deferred_bytes + _activation_bytes(config, layers) + held_bytes_of(layers)
    return KvRoom(
        budget_bytes=_budget_bytes(config.cache, layers.device, reserved_bytes=reserved),
        page_bytes=page_bytes,
    )


def held_bytes_of(layers: LoadedLayers) -> int:
    """Returns an estimate of what the rank of these layers holds of a GPU from its first rounds
    on, besides weights and pages."""
    return held_bytes(
        hidden_size=layers.spec.hidden_size,
        intermediate_size=layers.spec.intermediate_size,
        num_ranks=layers.num_ranks,
        bytes_per_value=layers.dtype.itemsize,
    )


def _budget_bytes(cache: CacheConfig, device: torch.device, *, reserved_bytes: int) -> int:
    if cache.kv_cache_bytes is not None:
        return cache.kv_cache_bytes
    memory = engine_on(device).memory(device)
    if memory is None:
        return CPU_BUDGET_BYTES
    return gpu_budget_bytes(
        total_bytes=memory.total,
        free_bytes=memory.free,
        own_bytes=memory.own,
        reserved_bytes=reserved_bytes,
        utilization=cache.gpu_memory_utilization,
    )


def _activation_bytes(config: EngineConfig, layers: LoadedLayers) -> int:
    """Estimates the largest round: its prompt rows, and a draft of each running request. Rows of
    prompts may have to be reported too."""
    spec, scheduler = layers.spec, config.scheduler
    num_sampled = scheduler.max_running * (config.speculation.max_draft_tokens + 1)
    num_reported = min(scheduler.token_budget, logits_block(spec.vocab_size))
    return activation_bytes(
        num_rows=scheduler.token_budget + num_sampled,
        num_sampled=max(num_sampled, num_reported),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        num_ranks=layers.num_ranks,
        bytes_per_value=layers.dtype.itemsize,
    )


def fallback_bytes(
    path: Path, spec: ModelSpec, *, split: int, rank: int, size: int, dtype: DType
) -> int:
    """Returns the bytes of a fallback's weights, from headers only: the embedding and its part of
    layers [0, split)."""
    shard, torch_dtype = Shard.of(spec, rank=rank, size=size), TORCH_DTYPES[dtype]
    with Checkpoint(path) as checkpoint:
        headers = Headers(checkpoint)
        for at in range(split):
            LayerWeights.read(headers, f"model.layers.{at}.", spec, shard, torch_dtype)
        read_embedding(headers, spec, dtype=torch_dtype)
        return headers.size_bytes
