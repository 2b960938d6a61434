"""What is kept of the frozen target per token, so that a head can be trained without running it.

A store is a folder: `shard-00000.safetensors`, ... and `manifest.json`, written last. Per token a
shard holds the hidden state after each exit layer, the target's `top_k` best logits and the exact
log-sum-exp over its whole vocabulary; per sequence the tokens, where the prompt ends, its class and
its temperature. Decides names, types and how damage is noticed; knows no engine, Ray or loss.

A shard appears under its name whole or not at all: it is written under another name first.
"""

# Shapes: T tokens of a sequence, N tokens of a shard, S its sequences, D hidden size, K top logits.

import hashlib
import json
import random
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from eesd_dist.distill.folders import write_whole
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.head_config import VerifierIdentity
from eesd_dist.model.spec import ModelSpec, read_json
from eesd_dist.model.weights import INDEX_FILE

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
HIDDEN_DTYPE = "bfloat16"
_LEAST_LOG_PROB = -6e4
"""What float16 can still hold."""
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard as the manifest knows it."""

    name: str
    num_sequences: int
    num_tokens: int
    num_bytes: int
    crc32: int
    """Over the whole file: safetensors itself does not notice a flipped bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureManifest:
    """What a store holds, of which target, and how it came about."""

    verifier: VerifierIdentity
    weights_sha256: str
    """`weights_fingerprint` of the target."""
    exits: tuple[int, ...]
    """Layers after which hidden states are kept, ascending."""
    top_k: int
    seed: int
    max_length: int
    """Longest sequence; longer ones were cut."""
    shards: tuple[ShardEntry, ...]
    dtype: str = HIDDEN_DTYPE
    """Of the stored hidden states."""
    version: int = FORMAT_VERSION
    plan_sha256: str = ""
    """Of everything that was to be collected; empty without a plan."""
    num_held_out: int | None = None
    """Prompts that were kept aside then; None where that is not known."""

    @property
    def num_sequences(self) -> int:
        return sum(shard.num_sequences for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def bytes_per_million_tokens(self) -> int:
        return round(1e6 * self.num_bytes / max(self.num_tokens, 1))

    def write(self, folder: Path) -> Path:
        file = folder / MANIFEST_FILE
        write_whole(file, (json.dumps(asdict(self), indent=2) + "\n").encode())
        return file

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises CheckpointError when there is none, or it is of another version."""
        file = folder / MANIFEST_FILE
        if not file.exists():
            raise CheckpointError(
                file=file,
                found="no manifest",
                expected="a folder of features that was collected to its end",
                advice="run `eesd distill collect` with the same options; it goes on where it was",
            )
        data = read_json(file)
        if data.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                file=file,
                found=f"features of version {data.get('version')!r}",
                expected=f"version {FORMAT_VERSION}",
                advice="collect them again into another folder",
            )
        try:
            return cls(**_parsed(data))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                file=file, found=f"{type(error).__name__}: {error}", expected="a whole manifest"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureSequence:
    """One text and what the target computed over it. Row t is about the token after token t."""

    tokens_T: Tensor
    """int64."""
    num_prompt: int
    """So many tokens were given; the target wrote the others. 0: a text taken as it is."""
    workload: str
    temperature: float
    """At which it was written; 0 for a text taken as it is."""
    hidden: Mapping[int, Tensor]
    """Exit layer to [T, D] bfloat16: the state after that many layers."""
    top_ids_TK: Tensor
    """int32, the best first."""
    top_logits_TK: Tensor
    """float32, at temperature 1. Stored as float16 log-probabilities: the likelier, the finer."""
    lse_T: Tensor
    """float32: log-sum-exp over the whole vocabulary, so that exp(top_logits - lse) are the
    target's own probabilities and what is left to 1 is the tail's."""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_T.shape[0])


class FeatureStore:
    """A finished store. Shards are read, and their checksums held against it, when asked for."""

    def __init__(self, folder: Path, manifest: FeatureManifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path, *, expect: VerifierIdentity | None) -> Self:
        """Raises CheckpointError when it is unfinished, of another target, or lacks a shard."""
        manifest = FeatureManifest.read(folder)
        if expect is not None and expect.sha256 != manifest.verifier.sha256:
            raise CheckpointError(
                file=folder / MANIFEST_FILE,
                found=f"features of {manifest.verifier.name_or_path!r}",
                expected=f"of {expect.name_or_path!r}: the hashes of config.json and "
                "tokenizer.json differ",
                advice="collect features of this target, or name the right --model",
            )
        for entry in manifest.shards:
            _require_size(folder / entry.name, entry)
        return cls(folder, manifest)

    @classmethod
    def of_target(cls, folder: Path, target_path: Path) -> Self:
        """Raises CheckpointError also for features of the same target with other weights."""
        store = cls.open(folder, expect=identity_of(target_path))
        if store.manifest.weights_sha256 != weights_fingerprint(target_path):
            raise CheckpointError(
                file=folder / MANIFEST_FILE,
                found="features of a target with other weights",
                expected=f"of the weights in {target_path}",
                advice="collect features of this target, or name the right --model",
            )
        return store

    @property
    def num_sequences(self) -> int:
        return self.manifest.num_sequences

    def shard(self, index: int) -> list[FeatureSequence]:
        """The sequences of one shard, in order. Raises CheckpointError when it was damaged."""
        entry = self.manifest.shards[index]
        file = self.folder / entry.name
        _require_size(file, entry)
        content = file.read_bytes()
        if zlib.crc32(content) != entry.crc32:
            raise _damaged(file, found="bytes that were changed (their checksum differs)")
        return _sequences_of(file, content)

    def sequences(self, only: Collection[int] | None = None) -> Iterator[FeatureSequence]:
        """All, or those with the wanted numbers, in the store's order, one shard in memory."""
        wanted = None if only is None else frozenset(only)
        first = 0
        for index, entry in enumerate(self.manifest.shards):
            numbers = range(first, first + entry.num_sequences)
            first = numbers.stop
            if wanted is not None and wanted.isdisjoint(numbers):
                continue
            for number, sequence in zip(numbers, self.shard(index), strict=True):
                if wanted is None or number in wanted:
                    yield sequence

    def split(self, held_out_share: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the sequences to train on and of those held out, both ascending.

        All answers to one prompt are on one side. The same share and seed give the same split
        anywhere; with a share above 0 at least one sequence is on either side.
        """
        if not 0.0 <= held_out_share < 1.0:
            raise ConfigError(f"held-out share {held_out_share}: expected 0 up to, not with, 1")
        count = self.num_sequences
        if held_out_share == 0.0:
            return tuple(range(count)), ()
        groups = self._alike()
        if len(groups) < 2:
            raise ConfigError(f"{self.folder}: {len(groups)} prompt(s) or text(s) cannot be split")
        random.Random(f"split/{seed}").shuffle(groups)
        num_wanted = max(round(held_out_share * count), 1)
        held: set[int] = set()
        for group in groups[:-1]:
            if len(held) >= num_wanted:
                break
            held.update(group)
        return tuple(n for n in range(count) if n not in held), tuple(sorted(held))

    def _alike(self) -> list[list[int]]:
        """Numbers of the sequences that answer the same prompt. Where nothing but a first token
        was given, as in texts and in what a service recorded, each is a group of its own."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, prompt in enumerate(self._prompts()):
            # No token is below 0.
            key = prompt if len(prompt) > 1 else (-1, number)
            groups.setdefault(key, []).append(number)
        return list(groups.values())

    def _prompts(self) -> Iterator[tuple[int, ...]]:
        """Of all sequences in order, without reading more of the shards than their tokens."""
        for entry in self.manifest.shards:
            file = self.folder / entry.name
            try:
                with safe_open(file, framework="pt") as shard:
                    lengths, counts, tokens_N = (
                        shard.get_tensor(name) for name in ("lengths_S", "num_prompt_S", "tokens_N")
                    )
            except SafetensorError as error:
                raise _damaged(file, found=f"unreadable content ({error})") from error
            parts = torch.split(tokens_N, lengths.tolist())
            for tokens_T, num_prompt in zip(parts, counts.tolist(), strict=True):
                yield tuple(tokens_T[:num_prompt].tolist())


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def write_shard(
    folder: Path, index: int, sequences: Sequence[FeatureSequence], *, stamp: str = ""
) -> ShardEntry:
    """Writes one shard, whole or not at all, for its owner alone: its tokens can be turned back
    into text. `stamp` tells the runs of different options apart."""
    if not sequences:
        raise ConfigError(f"{folder / shard_name(index)}: no sequence to write")
    header = {
        "version": FORMAT_VERSION,
        "stamp": stamp,
        "workloads": [sequence.workload for sequence in sequences],
    }
    # One metadata key only: with several, their order, and so the bytes, change from run to run.
    content = save(_tensors(sequences), metadata={"eesd": json.dumps(header, sort_keys=True)})
    write_whole(folder / shard_name(index), content, mode=0o600)
    return _entry(shard_name(index), content, [s.num_tokens for s in sequences])


def read_shard(file: Path) -> list[FeatureSequence]:
    """Raises CheckpointError for what is cut short or no shard of features."""
    return _sequences_of(file, _content(file))


def inspect_shard(file: Path, *, stamp: str) -> ShardEntry:
    """The entry of a shard that is there already. Raises CheckpointError when it was written with
    other options, for another target, or is damaged."""
    content = _content(file)
    header = _header(file, content)
    if header.stamp != stamp:
        raise CheckpointError(
            file=file,
            found="features collected with other options or of another target",
            expected="those of this run",
            advice="name another output folder, or remove this one",
        )
    lengths = [sequence.num_tokens for sequence in _sequences_of(file, content)]
    return _entry(file.name, content, lengths)


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over the weights' index, every file's size and header, and 64 KiB at the start, in
    the middle and at the end of its data: cheap for any size, and another training shows."""
    digest = hashlib.sha256()
    index = folder / INDEX_FILE
    if index.exists():
        digest.update(index.read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(file=folder, found="no safetensors", expected="a model's weights")
    for file in files:
        _digest_samples(digest, file)
    return digest.hexdigest()


def identity_of(target_path: Path) -> VerifierIdentity:
    """Of the target in this folder."""
    return VerifierIdentity.of(target_path, ModelSpec.from_folder(target_path))


# -- inside ---------------------------------------------------------------------------------------


def _tensors(sequences: Sequence[FeatureSequence]) -> dict[str, Tensor]:
    log_probs = [s.top_logits_TK.float() - s.lse_T.float().unsqueeze(-1) for s in sequences]
    tensors = {
        "lengths_S": torch.tensor([s.num_tokens for s in sequences], dtype=torch.int32),
        "num_prompt_S": torch.tensor([s.num_prompt for s in sequences], dtype=torch.int32),
        "temperature_S": torch.tensor([s.temperature for s in sequences], dtype=torch.float32),
        "tokens_N": torch.cat([s.tokens_T for s in sequences]).int(),
        "top_ids_NK": torch.cat([s.top_ids_TK for s in sequences]).int(),
        "top_log_probs_NK": torch.cat(log_probs).clamp(min=_LEAST_LOG_PROB).half(),
        "lse_N": torch.cat([s.lse_T for s in sequences]).float(),
    }
    for exit_layer in sorted(sequences[0].hidden):
        hidden_ND = torch.cat([s.hidden[exit_layer] for s in sequences])
        tensors[f"hidden_{exit_layer}_ND"] = hidden_ND.bfloat16()
    return {name: x.detach().cpu().contiguous() for name, x in tensors.items()}


def _sequences_of(file: Path, content: bytes) -> list[FeatureSequence]:
    workloads = _header(file, content).workloads
    try:
        tensors = load(content)
        lengths = tensors["lengths_S"].tolist()
        tokens, top_ids, log_probs, lse = (
            torch.split(tensors[name], lengths)
            for name in ("tokens_N", "top_ids_NK", "top_log_probs_NK", "lse_N")
        )
        hidden = {
            int(name.split("_")[1]): torch.split(x, lengths)
            for name, x in tensors.items()
            if name.startswith("hidden_")
        }
        return [
            FeatureSequence(
                tokens_T=tokens[s].long(),
                num_prompt=int(tensors["num_prompt_S"][s]),
                workload=workloads[s],
                temperature=float(tensors["temperature_S"][s]),
                hidden={exit_layer: hidden[exit_layer][s] for exit_layer in sorted(hidden)},
                top_ids_TK=top_ids[s],
                top_logits_TK=log_probs[s].float() + lse[s].unsqueeze(-1),
                lse_T=lse[s],
            )
            for s in range(len(lengths))
        ]
    except (SafetensorError, KeyError, IndexError, RuntimeError, ValueError) as error:
        raise _damaged(file, found=f"unreadable content ({error})") from error


class _Header(NamedTuple):
    stamp: str
    workloads: list[str]


def _header(file: Path, content: bytes) -> _Header:
    """Our part of the safetensors header: its length in 8 bytes, then JSON."""
    size = int.from_bytes(content[:8], "little")
    try:
        whole = json.loads(content[8 : 8 + size])
        header = json.loads(whole["__metadata__"]["eesd"])
        version = header["version"]
        found = _Header(str(header["stamp"]), [str(name) for name in header["workloads"]])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, found="no header of a shard of features") from error
    if version != FORMAT_VERSION:
        raise _damaged(file, found=f"a shard of version {version!r}")
    return found


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(file=file, found="no such file", expected="a shard") from None


def _entry(name: str, content: bytes, lengths: Sequence[int]) -> ShardEntry:
    return ShardEntry(
        name=name,
        num_sequences=len(lengths),
        num_tokens=sum(lengths),
        num_bytes=len(content),
        crc32=zlib.crc32(content),
    )


def _require_size(file: Path, entry: ShardEntry) -> None:
    if not file.exists():
        raise CheckpointError(
            file=file,
            found="no such file",
            expected="a shard that the manifest names",
            advice=f"remove {MANIFEST_FILE} and collect again: only this shard is made again",
        )
    if file.stat().st_size != entry.num_bytes:
        raise _damaged(file, found=f"{file.stat().st_size} bytes, not {entry.num_bytes}")


def _damaged(file: Path, *, found: str) -> CheckpointError:
    return CheckpointError(
        file=file,
        found=found,
        expected=f"a whole shard of features, version {FORMAT_VERSION}",
        advice=f"remove it and {MANIFEST_FILE} and collect again: only this shard is made again",
    )


def _parsed(data: Mapping[str, Any]) -> dict[str, Any]:
    verifier = {**data["verifier"], "architectures": tuple(data["verifier"]["architectures"])}
    return {
        **data,
        "verifier": VerifierIdentity(**verifier),
        "exits": tuple(int(exit_layer) for exit_layer in data["exits"]),
        "shards": tuple(ShardEntry(**shard) for shard in data["shards"]),
    }


def _digest_samples(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name} {size} ".encode())
    with file.open("rb") as data:
        header_bytes = int.from_bytes(data.read(8), "little")
        digest.update(data.read(min(header_bytes, size)))
        start = data.tell()
        for share in (0.0, 0.5, 1.0):
            data.seek(max(start, int(start + share * (size - start - _SAMPLE_BYTES))))
            digest.update(data.read(_SAMPLE_BYTES))
