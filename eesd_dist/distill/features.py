"""Feature stores: the frozen target's features per token, for training without the target.

A store is a folder: `shard-00000.safetensors`, ... and `manifest.json`, written last. Per token a
shard has the hidden state after each exit layer, the target's `top_k` best logits and the exact
log-sum-exp over its whole vocabulary; per sequence the tokens, the length of the prompt, its class
and its temperature. Defines names, types and checksums. Does not depend on engine, Ray or losses.

A shard is written atomically: it is renamed when it is complete.
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
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.heads.head_config import VerifierIdentity
from eesd_dist.model.spec import ModelSpec
from eesd_dist.model.weights import INDEX_FILE

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
HIDDEN_DTYPE = "bfloat16"
_LEAST_LOG_PROB = -6e4
"""Lower limit of a log-probability in float16."""
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """The manifest's entry of one shard."""

    name: str
    num_sequences: int
    num_tokens: int
    num_bytes: int
    crc32: int
    """Checksum of the whole file: safetensors does not detect a flipped bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureManifest:
    """Contents of a store, its target, and how it was collected."""

    verifier: VerifierIdentity
    weights_sha256: str
    """`weights_fingerprint` of the target."""
    exits: tuple[int, ...]
    """Layers after which hidden states are stored, ascending."""
    top_k: int
    seed: int
    max_length: int
    """Maximum length of a sequence; longer ones were cut."""
    shards: tuple[ShardEntry, ...]
    dtype: str = HIDDEN_DTYPE
    """Type of the stored hidden states."""
    version: int = FORMAT_VERSION
    plan_sha256: str = ""
    """Hash of the plan; empty without a plan."""
    num_held_out: int | None = None
    """Number of held-out prompts; None if unknown."""

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
        """Reads a manifest. Raises CheckpointError if there is none, or of another version."""
        file = folder / MANIFEST_FILE
        if not file.exists():
            raise CheckpointError(
                file=file,
                found="no manifest",
                expected="a folder of features that was collected to its end",
                advice="run `eesd distill collect` with the same options; it continues there",
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
                file=file, found=f"{type(error).__name__}: {error}", expected="a complete manifest"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureSequence:
    """A text and the target's features over it. Row t is about the token after token t."""

    tokens_T: Tensor
    """int64."""
    num_prompt: int
    """Tokens of the prompt; the target generated the others. 0: a text used unchanged."""
    workload: str
    temperature: float
    """Temperature of the generation; 0 for a text used unchanged."""
    hidden: Mapping[int, Tensor]
    """Exit layer -> [T, D] bfloat16: the hidden state after that many layers."""
    top_ids_TK: Tensor
    """int32, the best first."""
    top_logits_TK: Tensor
    """float32, at temperature 1. Stored as float16 log-probabilities, more precise for likelier
    tokens."""
    lse_T: Tensor
    """float32: log-sum-exp over the whole vocabulary, so that exp(top_logits - lse) are the
    target's probabilities; the rest to 1 is the tail's."""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_T.shape[0])


class FeatureStore:
    """A finished store. Shards are read and their checksums verified on access."""

    def __init__(self, folder: Path, manifest: FeatureManifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path, *, expect: VerifierIdentity | None) -> Self:
        """Opens a store. Raises CheckpointError if it is unfinished, of another target, or lacks a
        shard."""
        manifest = FeatureManifest.read(folder)
        if expect is not None and expect.sha256 != manifest.verifier.sha256:
            raise CheckpointError(
                file=folder / MANIFEST_FILE,
                found=f"features of {manifest.verifier.name_or_path!r}",
                expected=f"of {expect.name_or_path!r}: the hashes of config.json and "
                "tokenizer.json differ",
                advice="collect features of this target, or set the right --model",
            )
        for entry in manifest.shards:
            _require_size(folder / entry.name, entry)
        return cls(folder, manifest)

    @classmethod
    def of_target(cls, folder: Path, target_path: Path) -> Self:
        """Opens a store. Raises CheckpointError as `open` does, and for other weights."""
        store = cls.open(folder, expect=identity_of(target_path))
        if store.manifest.weights_sha256 != weights_fingerprint(target_path):
            raise CheckpointError(
                file=folder / MANIFEST_FILE,
                found="features of a target with other weights",
                expected=f"of the weights in {target_path}",
                advice="collect features of this target, or set the right --model",
            )
        return store

    @property
    def num_sequences(self) -> int:
        return self.manifest.num_sequences

    def shard(self, index: int) -> list[FeatureSequence]:
        """Returns the sequences of one shard, in order. Raises CheckpointError if it is damaged."""
        entry = self.manifest.shards[index]
        file = self.folder / entry.name
        _require_size(file, entry)
        content = file.read_bytes()
        if zlib.crc32(content) != entry.crc32:
            raise _damaged(file, content="changed bytes (the checksum differs)")
        return _sequences_of(file, content)

    def sequences(self, only: Collection[int] | None = None) -> Iterator[FeatureSequence]:
        """Yields all sequences, or those with the given numbers, in order, one shard in memory."""
        selected = None if only is None else frozenset(only)
        first = 0
        for index, entry in enumerate(self.manifest.shards):
            numbers = range(first, first + entry.num_sequences)
            first = numbers.stop
            if selected is not None and selected.isdisjoint(numbers):
                continue
            for number, sequence in zip(numbers, self.shard(index), strict=True):
                if selected is None or number in selected:
                    yield sequence

    def split(self, held_out_share: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the numbers of the training and of the held-out sequences, both ascending.

        All answers to one prompt are in the same part. The same share and seed give the same split
        on every machine; with a share above 0 each part has at least one sequence.
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
        min_held_out = max(round(held_out_share * count), 1)
        held: set[int] = set()
        for group in groups[:-1]:
            if len(held) >= min_held_out:
                break
            held.update(group)
        return tuple(n for n in range(count) if n not in held), tuple(sorted(held))

    def _alike(self) -> list[list[int]]:
        """Returns groups of sequences that answer the same prompt. A sequence with a prompt of at
        most one token, as in texts and recordings of a service, is a separate group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (tokens_T, num_prompt) in enumerate(self.texts()):
            prompt = tuple(tokens_T[:num_prompt].tolist())
            # -1 is no token id.
            key = prompt if len(prompt) > 1 else (-1, number)
            groups.setdefault(key, []).append(number)
        return list(groups.values())

    def texts(self) -> Iterator[tuple[Tensor, int]]:
        """Yields the tokens [T] of every sequence in order, and how many of them are its prompt.
        Reads no other tensor of the shards."""
        for entry in self.manifest.shards:
            file = self.folder / entry.name
            try:
                with safe_open(file, framework="pt") as shard:
                    lengths, counts, tokens_N = (
                        shard.get_tensor(name) for name in ("lengths_S", "num_prompt_S", "tokens_N")
                    )
            except SafetensorError as error:
                raise _damaged(file, content=f"unreadable content ({error})") from error
            yield from zip(torch.split(tokens_N, lengths.tolist()), counts.tolist(), strict=True)


def row_bytes(hidden_size: int, *, num_exits: int, top_k: int) -> int:
    """Returns the bytes of one row on disk: hidden states, best tokens, token, log-sum-exp."""
    return 2 * num_exits * hidden_size + 6 * top_k + 8


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def write_shard(
    folder: Path, index: int, sequences: Sequence[FeatureSequence], *, stamp: str = ""
) -> ShardEntry:
    """Writes one shard atomically, readable by its owner only: its tokens can be decoded to text.
    `stamp` identifies the options of the run."""
    if not sequences:
        raise ConfigError(f"{folder / shard_name(index)}: no sequence to write")
    header = {
        "version": FORMAT_VERSION,
        "stamp": stamp,
        "workloads": [sequence.workload for sequence in sequences],
    }
    # One metadata key only: with several, their order and the file's bytes differ between runs.
    content = save(_tensors(sequences), metadata={"eesd": json.dumps(header, sort_keys=True)})
    write_whole(folder / shard_name(index), content, mode=0o600)
    return _entry(shard_name(index), content, [s.num_tokens for s in sequences])


def inspect_shard(file: Path, *, stamp: str) -> ShardEntry:
    """Returns the entry of an existing shard. Raises CheckpointError if it was written with other
    options or for another target, or is damaged."""
    content = _content(file)
    header = _header(file, content)
    if header.stamp != stamp:
        raise CheckpointError(
            file=file,
            found="features collected with other options or of another target",
            expected="those of this run",
            advice="use another output folder, or remove this one",
        )
    lengths = [sequence.num_tokens for sequence in _sequences_of(file, content)]
    return _entry(file.name, content, lengths)


def weights_fingerprint(folder: Path) -> str:
    """Returns SHA-256 over the weights' index, every file's size and header, and 64 KiB at the
    start, middle and end of its data: cheap for any size, and different for further training."""
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
    """Returns the identity of the target in this folder."""
    return VerifierIdentity.of(target_path, ModelSpec.from_folder(target_path))


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
        raise _damaged(file, content=f"unreadable content ({error})") from error


class _Header(NamedTuple):
    stamp: str
    workloads: list[str]


def _header(file: Path, content: bytes) -> _Header:
    """Parses this project's part of the safetensors header: its length in 8 bytes, then JSON."""
    size = int.from_bytes(content[:8], "little")
    try:
        whole = json.loads(content[8 : 8 + size])
        header = json.loads(whole["__metadata__"]["eesd"])
        version = header["version"]
        parsed = _Header(str(header["stamp"]), [str(name) for name in header["workloads"]])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, content="no header of a shard of features") from error
    if version != FORMAT_VERSION:
        raise _damaged(file, content=f"a shard of version {version!r}")
    return parsed


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
        raise _damaged(file, content=f"{file.stat().st_size} bytes instead of {entry.num_bytes}")


def _damaged(file: Path, *, content: str) -> CheckpointError:
    return CheckpointError(
        file=file,
        found=content,
        expected=f"a complete shard of features, version {FORMAT_VERSION}",
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
