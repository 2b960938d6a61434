"""The folder of a model that a path names, and what to do where there is none that can be loaded.

A name of the Hugging Face hub (`org/model`) is downloaded, if `huggingface_hub` is installed and
reaches the hub. A GGUF file, or a folder with one, is converted once. Adapters, quantized weights
and other formats than safetensors are named with the way to a checkpoint that can be loaded. Reads
no configuration and imports no torch.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.config import EngineConfig
from eesd_dist.errors import CheckpointError, listed
from eesd_dist.user_folders import cache_folder

logger = logging.getLogger(__name__)

_BUNDLED_NAME = "bundled"
DOWNLOADED_MODEL = "smollm2"
"""Name of the model that `make model` downloads."""
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
_NOT_DOWNLOADED = ("original/*", "consolidated*", "onnx/*")
"""Copies of the same weights in other formats."""
_FOLDER = "a folder with config.json and safetensors"
_FORMATS: Mapping[str, tuple[str, str]] = {
    "*.gguf": ("GGUF weights", "give the file itself, which is converted"),
    "consolidated*": (
        "weights in the layout of the model's authors",
        "use the checkpoint in the layout of transformers, which has a config.json",
    ),
    "pytorch_model*.bin": (
        "PyTorch's pickled weights",
        "load them with transformers and save them with save_pretrained, which writes safetensors",
    ),
}
"""Descriptions of files, and what to do, by their names."""
_MERGE = "merge it into the base model with merge_and_unload of peft, and save that"
_FOREIGN_TENSORS: Mapping[str, tuple[str, str]] = {
    r"\.(qweight|qzeros|g_idx)$": ("weights quantized by GPTQ or AWQ", ""),
    r"\.(weight_packed|weight_scale|weight_scale_inv)$": ("quantized weights", ""),
    r"\.(SCB|absmax|quant_map|quant_state\.\w+)$": ("weights quantized by bitsandbytes", ""),
    r"\.(lora_[AB]\.|base_layer\.)": ("a LoRA adapter next to its base model", _MERGE),
}
"""Descriptions of tensors, and what to do, by patterns of their names."""
_UNQUANTIZED = "use the checkpoint that is not quantized"


def with_local_folder(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with the model's folder on this machine. Downloads a model of the
    hub, and converts a GGUF file. Raises CheckpointError if it cannot."""
    path = local_folder(config.model.path)
    if path == config.model.path:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def local_folder(path: Path) -> Path:
    """Returns the path, or the folder of the downloaded model if it is a name of the hub, of the
    bundled model if it is `bundled`, or that made of a GGUF file."""
    if str(path) == _BUNDLED_NAME and not path.exists():
        return BUNDLED_MODEL
    if (file := gguf_file(path)) is not None:
        # Imported here: it imports torch.
        from eesd_dist.model.gguf.folder import checkpoint_of

        return checkpoint_of(file)
    name = str(path)
    if path.exists() or not _HUB_NAME.fullmatch(name):
        return path
    try:
        import huggingface_hub
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its client's
    except ImportError as error:
        raise _no_download(path, "huggingface_hub is not installed") from error
    logger.info("downloading, unless it is cached: model=%s", name)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=list(_DOWNLOADED),
                ignore_patterns=list(_NOT_DOWNLOADED),
            )
        )
    except (OSError, ValueError, HTTPError) as error:
        raise _no_download(path, str(error).strip().partition("\n")[0]) from error


def gguf_file(path: Path) -> Path | None:
    """Returns the GGUF file that the path is, or that is alone in it without a config.json, or that
    `make model` has downloaded. Raises CheckpointError for several files, and before the
    download."""
    if str(path) == DOWNLOADED_MODEL and not path.exists():
        file = downloaded_file()
        if not file.exists():
            raise CheckpointError(
                file=file,
                found="no such file",
                expected="the model that is downloaded",
                advice="download it with `make model`",
            )
        return file
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(
            file=path,
            found=f"{len(files)} GGUF files: {listed([file.name for file in files])}",
            expected="one",
            advice="give one of them; of a model in several parts, use the safetensors",
        )
    return files[0] if files else None


def downloaded_file() -> Path:
    """Returns the file into which `make model` downloads SmolLM2-135M-Instruct."""
    return cache_folder() / "models" / "SmolLM2-135M-Instruct.gguf"


def _no_download(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        file=path,
        found=f"no such folder, and no model of this name from the Hugging Face hub ({reason})",
        expected=_FOLDER,
        advice=_download(path),
    )


def _download(path: Path) -> str:
    return f"download it with `hf download {path} --local-dir FOLDER`, and give that folder"


def require_checkpoint(path: Path) -> None:
    """Raises CheckpointError, with what was found and what to do, if the path is no folder with the
    config.json of a whole model."""
    if path.is_file():
        content, advice = _format_of([path]) or ("a file", "give the folder that it is in")
        raise CheckpointError(file=path, found=content, expected=_FOLDER, advice=advice)
    if not path.is_dir():
        advice = _download(path) if _HUB_NAME.fullmatch(str(path)) else ""
        raise CheckpointError(
            file=path, found="no such folder", expected="a checkpoint folder", advice=advice
        )
    adapter = path / "adapter_config.json"
    if adapter.exists():
        raise CheckpointError(
            file=adapter,
            found=f"a LoRA adapter of {_base_of(adapter)}",
            expected="a whole model",
            advice=f"{_MERGE}; remove this file if the weights are merged already",
        )
    if not (path / "config.json").is_file():
        content, advice = _format_of(path.iterdir()) or ("no config.json", _snapshots_in(path))
        raise CheckpointError(
            file=path, found=content, expected="a Hugging Face model folder", advice=advice
        )


def no_safetensors(folder: Path, *, expected: str) -> CheckpointError:
    """Returns the error of a folder that has a config.json and no safetensors."""
    content, advice = _format_of(folder.iterdir()) or ("no safetensors", "")
    return CheckpointError(file=folder, found=content, expected=expected, advice=advice)


def require_plain_tensors(folder: Path, names: Collection[str]) -> None:
    """Raises CheckpointError for tensors that are the parts of quantized or adapted weights."""
    for pattern, (what, advice) in _FOREIGN_TENSORS.items():
        name = next((name for name in names if re.search(pattern, name)), None)
        if name is not None:
            raise CheckpointError(
                file=folder,
                found=f"{what} ({name})",
                expected="plain float weights",
                advice=advice or _UNQUANTIZED,
            )


def quantized(file: Path, config: object) -> CheckpointError:
    """Returns the error of a config.json with a `quantization_config`."""
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    return CheckpointError(
        file=file,
        found=f"quantization_config of the method {method!r:.60}",
        expected="plain float weights",
        advice=_UNQUANTIZED,
    )


def _format_of(files: Iterable[Path]) -> tuple[str, str] | None:
    """Returns what the first known file is, and what to do."""
    for file in sorted(files):
        for pattern, (what, advice) in _FORMATS.items():
            if file.match(pattern):
                return f"{what} ({file.name})", advice
    return None


def _base_of(adapter: Path) -> str:
    try:
        return str(json.loads(adapter.read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown model"


def _snapshots_in(path: Path) -> str:
    """Returns the advice for a folder of the hub's cache; empty for others."""
    folders = [config.parent for config in sorted(path.glob("snapshots/*/config.json"))]
    return f"give the snapshot in it: {folders[-1]}" if folders else ""
