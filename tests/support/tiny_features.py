"""A tiny target and its features of some random texts: a real store, made without an engine."""

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from eesd_dist.distill.features import (
    FeatureManifest,
    FeatureSequence,
    FeatureStore,
    _content,
    _sequences_of,
    identity_of,
    weights_fingerprint,
    write_shard,
)
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_checkpoints import save_tiny_model

EXIT_LAYER = 1
NUM_PROMPT = 5


def write_tiny_target(folder: Path) -> Path:
    save_tiny_model(folder, num_hidden_layers=3, hidden_size=32, intermediate_size=48, head_dim=8)
    return folder


def read_shard(file: Path) -> list[FeatureSequence]:
    """Reads a shard. Raises CheckpointError for a truncated file, or one that is not a shard."""
    return _sequences_of(file, _content(file))


def write_tiny_features(
    folder: Path,
    target_path: Path,
    *,
    num_sequences: int = 48,
    num_shards: int = 3,
    shard_sizes: Sequence[int] | None = None,
    top_k: int = 16,
) -> FeatureStore:
    """Collects texts of 12 to 24 tokens, in shards of equal numbers, or of the given ones."""
    sizes = shard_sizes or [num_sequences // num_shards] * num_shards
    rng = random.Random(7)
    texts = [
        [rng.randrange(3, 96) for _ in range(rng.randrange(12, 25))] for _ in range(sum(sizes))
    ]
    target = FrozenTarget(target_path, ModelSpec.from_folder(target_path), [EXIT_LAYER])
    sequences = [
        FeatureSequence(
            tokens_T=torch.tensor(text),
            num_prompt=NUM_PROMPT,
            workload="tiny",
            temperature=1.0,
            hidden=view.hidden,
            top_ids_TK=view.top_ids_TK,
            top_logits_TK=view.top_logits_TK,
            lse_T=view.lse_T,
        )
        for text, view in zip(texts, target.view(texts, top_k=top_k), strict=True)
    ]
    sequence_iterator = iter(sequences)
    entries = tuple(
        write_shard(folder, at, list(islice(sequence_iterator, size)))
        for at, size in enumerate(sizes)
    )
    FeatureManifest(
        verifier=identity_of(target_path),
        weights_sha256=weights_fingerprint(target_path),
        exits=(EXIT_LAYER,),
        top_k=top_k,
        seed=0,
        max_length=24,
        shards=entries,
    ).write(folder)
    return FeatureStore.open(folder, expect=identity_of(target_path))
