"""What a running service has spooled, taken aside as a feature store to train on.

The service goes on meanwhile, writes new shards and removes old ones: what is gone when its turn
comes is left out, what is damaged or of another target is refused. It decides which pieces fit a
head and trains nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from eesd_dist.distill.features import (
    MANIFEST_FILE,
    FeatureManifest,
    FeatureSequence,
    FeatureStore,
    identity_of,
    weights_fingerprint,
    write_shard,
)
from eesd_dist.errors import CheckpointError, ConfigError

_PER_SHARD = 256


def take_aside(
    spool: Path, folder: Path, *, target: Path, exit_layer: int, seed: int
) -> FeatureStore:
    """Copies the pieces that stand now in `spool`, or in folders below it, one for each node that
    drafts; a finished copy in `folder` is taken as it is.

    Raises ConfigError for an empty spool, CheckpointError for one of another target or with rows
    after another layer.
    """
    verifier = identity_of(target)
    if not (folder / MANIFEST_FILE).exists():
        expected = FeatureManifest(
            verifier=verifier,
            weights_sha256=weights_fingerprint(target),
            exits=(exit_layer,),
            top_k=0,
            seed=seed,
            max_length=0,
            shards=(),
        )
        _copy(list(_pieces(spool, expected)), spool, folder, expected)
    return FeatureStore.open(folder, expect=verifier)


def _pieces(spool: Path, expected: FeatureManifest) -> Iterator[FeatureSequence]:
    for file in sorted(spool.rglob(MANIFEST_FILE)):
        manifest = FeatureManifest.read(file.parent)
        _require_same_rows(file, manifest, expected)
        store = FeatureStore(file.parent, manifest)
        for index, entry in enumerate(manifest.shards):
            try:
                yield from store.shard(index)
            except CheckpointError:
                if (file.parent / entry.name).exists():
                    raise
                # The service has made room for newer ones since it wrote this manifest.


def _copy(
    pieces: list[FeatureSequence], spool: Path, folder: Path, manifest: FeatureManifest
) -> None:
    """Services may have kept more or fewer best tokens; a store keeps equally many of all."""
    if not pieces:
        raise ConfigError(
            f"{spool}: found nothing spooled, expected shards that a service wrote: serve with "
            "spool.folder set to this folder, let it answer requests, then refresh"
        )
    top_k = min(piece.top_ids_TK.shape[1] for piece in pieces)
    alike = [
        replace(
            piece,
            top_ids_TK=piece.top_ids_TK[:, :top_k],
            top_logits_TK=piece.top_logits_TK[:, :top_k],
        )
        for piece in pieces
    ]
    replace(
        manifest,
        top_k=top_k,
        max_length=max(piece.num_tokens for piece in alike),
        shards=tuple(
            write_shard(folder, index, alike[first : first + _PER_SHARD])
            for index, first in enumerate(range(0, len(alike), _PER_SHARD))
        ),
    ).write(folder)


def _require_same_rows(file: Path, found: FeatureManifest, expected: FeatureManifest) -> None:
    if (found.verifier.sha256, found.weights_sha256) != (
        expected.verifier.sha256,
        expected.weights_sha256,
    ):
        raise CheckpointError(
            file=file,
            found=f"what {found.verifier.name_or_path!r} computed, by its hashes another target",
            expected=f"what {expected.verifier.name_or_path!r} computed",
            advice="name with --model the target that the service serves",
        )
    if found.exits != expected.exits:
        raise CheckpointError(
            file=file,
            found=f"rows after layer {', '.join(str(at) for at in found.exits)}",
            expected=f"rows after layer {expected.exits[0]}, which the head reads",
            advice="name with --head the one that the service drafts with",
        )
