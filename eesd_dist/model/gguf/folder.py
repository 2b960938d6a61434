"""Makes a checkpoint folder of a GGUF file, in the cache, and keeps it.

Every step that reads a model then reads a folder with config.json, safetensors and a tokenizer.
Weights are those of the `gguf` package's dequantiser, bit for bit: quantized types become float32,
the others keep theirs. The folder appears when it is complete: a conversion can be interrupted at
any time, and two processes convert one file once.
"""

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from eesd_dist.errors import CheckpointError
from eesd_dist.model.gguf.config import NamedTensor, config_of, named_tensors
from eesd_dist.model.gguf.header import StoredTensor, read_header
from eesd_dist.model.gguf.tokenizer import end_tokens, write_tokenizer
from eesd_dist.user_folders import cache_folder

logger = logging.getLogger(__name__)

_LAYOUT = "1"
"""Part of a folder's name: another one where the same file gives another folder."""
_SHARD_BYTES = 1 << 30
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 14
_COPIED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def checkpoint_of(file: Path) -> Path:
    """Returns the folder made of this file, now or before. Raises CheckpointError for a damaged or
    unsupported file, or where there is no room for the folder."""
    models = cache_folder() / "models"
    folder = models / f"{file.stem}-{_digest(file)[:16]}"
    if folder.exists():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{folder.name}.lock"):
            if not folder.exists():
                written = models / f".{folder.name}.new"
                shutil.rmtree(written, ignore_errors=True)
                written.mkdir()
                try:
                    _write(file, written)
                    written.rename(folder)
                finally:
                    shutil.rmtree(written, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            file=error.filename or models,
            found=str(error.strerror or error),
            expected=f"a folder for the converted weights of {file.name}",
            advice="set EESD_CACHE_DIR to a folder that can be written",
        ) from error
    return folder


def _write(file: Path, folder: Path) -> None:
    header = read_header(file)
    # Before the tokenizer, which takes seconds.
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    config = config_of(file, header, vocab_size=num_tokens)
    tensors = named_tensors(file, header, config)
    size = sum(4 * tensor.stored.num_weights for tensor in tensors)
    if size > (free := shutil.disk_usage(folder).free):
        raise CheckpointError(
            file=folder.parent,
            found=f"{free / 1e9:.1f} GB free",
            expected=f"{size / 1e9:.1f} GB for the weights of {file.name}",
            advice="set EESD_CACHE_DIR to a folder on a larger disk",
        )
    logger.info("converting to safetensors: file=%s folder=%s", file, folder.parent)
    vocab_size = write_tokenizer(file, header.metadata, folder)
    generation = {"eos_token_id": end_tokens(header.metadata, vocab_size=vocab_size)}
    _write_json(folder / "generation_config.json", generation)
    write_weights(file, tensors, folder)
    _write_json(folder / "config.json", config)


def write_weights(file: Path, tensors: list[NamedTensor], folder: Path) -> None:
    """Writes the tensors as safetensors, with an index; holds one shard in memory."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total_bytes = 0

    def finish_shard() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    content = np.memmap(file, mode="r")
    for tensor in tensors:
        size = sum(x.nbytes for x in shard.values())
        if shard and size + 4 * tensor.stored.num_weights > _SHARD_BYTES:
            finish_shard()
        x = _weights(content, tensor.stored)
        if tensor.num_heads is not None:
            x = x.view(tensor.num_heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        shard[tensor.name] = x.contiguous()
        total_bytes += x.nbytes
    finish_shard()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _weights(content: np.ndarray, stored: StoredTensor) -> Tensor:
    from gguf import GGMLQuantizationType, dequantize

    raw = content[stored.start : stored.start + stored.num_bytes]
    if (dtype := _COPIED.get(stored.type)) is not None:
        return torch.from_numpy(raw.copy()).view(dtype).view(stored.shape)
    rows = raw.reshape(*stored.shape[:-1], -1)
    weights = dequantize(rows, GGMLQuantizationType[stored.type])
    return torch.from_numpy(np.ascontiguousarray(weights, dtype=np.float32))


def _digest(file: Path) -> str:
    """Returns a digest of the file's size, time of change, and samples of its content."""
    try:
        status = file.stat()
        digest = hashlib.sha256(f"{_LAYOUT} {status.st_size} {status.st_mtime_ns}".encode())
        last = max(0, status.st_size - _SAMPLE_BYTES)
        with file.open("rb") as content:
            for sample in range(_SAMPLES):
                content.seek(last * sample // (_SAMPLES - 1))
                digest.update(content.read(_SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(
            file=file, found=str(error.strerror), expected="a GGUF file"
        ) from error
    return digest.hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
