"""Reads tensors, or parts of tensors, from safetensors folders.

Finds the file of a tensor (one file, or many with an index) and checks name, shape and type; a
mismatch is a CheckpointError with file, found and expected. What wrappers such as torch.compile add
to names is left out. Does not depend on the model.

A type narrower than the stored one rounds weights. Changed weights are counted, and a warning has
the count when the checkpoint is closed; a weight that would become infinite is refused. Equal and
wider types lose nothing.

A stored tensor that the model does not use is reported, unless its values follow from the
configuration.

Files are memory-mapped, so that a part of a tensor touches only the pages it needs; results are
copies that do not refer to the file. Mapped pages count as a process's memory until the files are
closed: `close_files` after each piece of a large checkpoint keeps that small.
"""

import hashlib
import logging
import math
import os
import re
import threading
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eesd_dist.errors import CheckpointError, listed
from eesd_dist.model.checkpoint_folder import no_safetensors, require_plain_tensors
from eesd_dist.model.config_fields import read_json

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of each supported weight type."""
_EXACT = {
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
}
"""Conversions to a wider type."""
_WRAPPERS = re.compile(
    r"^module\.|(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Parts of names from wrappers of modules: those of torch.compile, FSDP, checkpointing, and DDP."""
_BLOCK = 1 << 18
"""Weights per compared block: small enough for the caches."""
_COMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tensors that older versions of libraries stored, and that config.json determines."""
_SAMPLES = 64
_SAMPLE_BYTES = 4096


class _Stored(NamedTuple):
    """The file of a tensor, and its name there."""

    file: str
    name: str


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _OpenFile(Protocol):
    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class TensorSource(Protocol):
    """Source of a model's parameters: a checkpoint, or its headers only."""

    def read(
        self,
        name: str,
        *,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype,
        own: bool = True,
    ) -> Tensor:
        """Returns a tensor; with `own` False it may be a view of the file, to be copied from."""
        ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(slots=True)
class Rounding:
    """Number of weights that were read, and of those that differ from the stored ones."""

    num_read: int = 0
    num_changed: int = 0


class _Files(threading.local):
    """The files that a thread has open, by name."""

    def __init__(self) -> None:
        self.opened: dict[str, _OpenFile] = {}


class Checkpoint:
    """A folder of weights, opened lazily file by file. Threads may read at the same time: each
    opens the files for itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounding = Rounding()
        self._counting = threading.Lock()
        self._files = _Files()
        self._stored = self._locate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close_files()
        if kind is None and self.rounding.num_changed:
            logger.warning(
                "weights rounded: folder=%s changed=%d of=%d: model.dtype is narrower than the "
                "stored type",
                self.folder,
                self.rounding.num_changed,
                self.rounding.num_read,
            )

    def close_files(self) -> None:
        """Releases the pages that this thread has mapped; its next read opens the file again."""
        self._files.opened.clear()  # nothing else holds the handles

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> Set[str]:
        """Names of all stored tensors."""
        return self._stored.keys()

    def _locate(self) -> dict[str, _Stored]:
        """Returns where each tensor is, by its name in the model."""
        stored: dict[str, _Stored] = {}
        for name, file in self._files_by_name().items():
            plain = _WRAPPERS.sub("", name)
            if plain in stored:
                raise CheckpointError(
                    file=self.folder / file,
                    found=f"{name} and {stored[plain].name}",
                    expected=f"one tensor {plain}: what comes before is of a wrapper",
                )
            stored[plain] = _Stored(file, name)
        require_plain_tensors(self.folder, stored)
        return stored

    def _files_by_name(self) -> dict[str, str]:
        """Returns the file of each tensor: the only one, or what the index says."""
        if (self.folder / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        index = self.folder / INDEX_FILE
        if not index.exists():
            raise no_safetensors(self.folder, expected=f"{SINGLE_FILE} or {INDEX_FILE}")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                file=index, found="no weight_map", expected="tensor names to files"
            )
        return {str(name): str(file) for name, file in weight_map.items()}

    def read(
        self,
        name: str,
        *,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype,
        own: bool = True,
    ) -> Tensor:
        """Returns a float tensor of this shape, or only its `rows` and `columns`."""
        file, tensor_slice = self._checked_slice(name, shape)
        index = _index(shape, rows=rows, columns=columns)
        try:
            stored = tensor_slice[index]
            content = (
                torch.empty(stored.shape, dtype=dtype).copy_(stored) if own else stored.to(dtype)
            )
        except SafetensorError as error:
            raise self._unreadable(file, error) from error
        self._count_rounding(name, file, stored, content)
        return content

    def _count_rounding(self, name: str, file: str, stored: Tensor, content: Tensor) -> None:
        num_changed = self._num_changed(name, file, stored, content)
        with self._counting:
            self.rounding.num_read += content.numel()
            self.rounding.num_changed += num_changed

    def _num_changed(self, name: str, file: str, stored: Tensor, content: Tensor) -> int:
        if stored.dtype == content.dtype or (stored.dtype, content.dtype) in _EXACT:
            return 0
        total = 0
        num_blocks = -(-stored.numel() // _BLOCK) or 1
        blocks = (x.reshape(-1).chunk(num_blocks) for x in (stored, content))
        for stored_N, content_N in zip(*blocks, strict=True):
            is_changed_N = content_N.to(stored.dtype) != stored_N
            num_changed = int(is_changed_N.sum())
            if not num_changed:
                continue
            total += num_changed
            if bool((content_N.isinf() & stored_N.isfinite()).any()):
                raise CheckpointError(
                    file=self.folder / file,
                    found=f"{name} with a weight of {float(stored_N.abs().max()):g}",
                    expected=f"at most {torch.finfo(content.dtype).max:g}, the largest "
                    f"{str(content.dtype).removeprefix('torch.')}",
                    advice="choose a wider model.dtype",
                )
        return total

    def stored_type(self, name: str) -> str:
        """Returns safetensors' name for the type of a float tensor: F64, F32, F16 or BF16."""
        file, tensor_slice = self._slice(name)
        return self._require_float(name, file, tensor_slice)

    def size_of(
        self,
        name: str,
        *,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
    ) -> int:
        """Returns the bytes that `read` would read from the file, after the same checks."""
        _, tensor_slice = self._checked_slice(name, shape)
        slices = _index(shape, rows=rows, columns=columns)
        count: int = math.prod(bounds.stop - bounds.start for bounds in slices)
        return _FLOATS[tensor_slice.get_dtype()] * count

    def read_raw(self, name: str, *, shape: Sequence[int]) -> Tensor:
        """Returns a whole tensor in its stored type (for example an index map)."""
        file, tensor_slice = self._slice(name)
        self._require(name, file, tensor_slice, tuple(shape))
        try:
            return self._open(file).get_tensor(self._stored[name].name)
        except SafetensorError as error:
            raise self._unreadable(file, error) from error

    def _checked_slice(self, name: str, shape: Sequence[int]) -> tuple[str, _Slice]:
        """Returns file and slice of a tensor after checking its shape and type."""
        file, tensor_slice = self._slice(name)
        self._require(name, file, tensor_slice, tuple(shape))
        self._require_float(name, file, tensor_slice)
        return file, tensor_slice

    def _require_float(self, name: str, file: str, tensor_slice: _Slice) -> str:
        if tensor_slice.get_dtype() not in _FLOATS:
            raise CheckpointError(
                file=self.folder / file,
                found=f"{name} of type {tensor_slice.get_dtype()}",
                expected=f"one of {', '.join(_FLOATS)}",
            )
        return tensor_slice.get_dtype()

    def _slice(self, name: str) -> tuple[str, _Slice]:
        if name not in self:
            raise CheckpointError(
                file=self.folder,
                found=f"no tensor {name}",
                expected="the tensor in a safetensors file",
            )
        stored = self._stored[name]
        try:
            return stored.file, self._open(stored.file).get_slice(stored.name)
        except SafetensorError as error:
            raise CheckpointError(
                file=self.folder / stored.file,
                found=f"no tensor {stored.name} ({error})",
                expected="the tensor that the index lists in this file",
            ) from error

    def _require(self, name: str, file: str, tensor_slice: _Slice, shape: tuple[int, ...]) -> None:
        if tuple(tensor_slice.get_shape()) != shape:
            raise CheckpointError(
                file=self.folder / file,
                found=f"{name} of shape {tuple(tensor_slice.get_shape())}",
                expected=f"{shape} as config.json implies",
            )

    def _open(self, file: str) -> _OpenFile:
        files = self._files.opened
        if file not in files:
            path = self.folder / file
            try:
                opened: _OpenFile = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(
                    file=path, found="no such file", expected="a shard that the index names"
                ) from None
            except PermissionError as error:
                raise _forbidden(path) from error
            except (SafetensorError, OSError) as error:
                raise self._unreadable(file, error) from error
            files[file] = opened
        return files[file]

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            file=self.folder / file,
            found=f"unreadable content ({error})",
            expected="a complete safetensors file",
            advice="copy it again; it is probably cut short",
        )


class Headers:
    """Sums up what a rank would read of a checkpoint, from headers only.

    Takes the place of a `Checkpoint`; its tensors have shapes and no content.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.size_bytes = 0
        """Total size of all tensors read so far."""

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read(
        self,
        name: str,
        *,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype,
        own: bool = True,
    ) -> Tensor:
        self.size_bytes += self._checkpoint.size_of(name, shape=shape, rows=rows, columns=columns)
        slices = _index(shape, rows=rows, columns=columns)
        return torch.empty(
            [bounds.stop - bounds.start for bounds in slices], dtype=dtype, device="meta"
        )


class Shapes:
    """Records which tensors a model uses, and their shapes, without opening a file.

    Takes the place of a `Checkpoint` that stores `stored`; its tensors have shapes and no content.
    """

    def __init__(self, stored: Container[str] = ()) -> None:
        self._stored = stored
        self.of: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(
        self,
        name: str,
        *,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype,
        own: bool = True,
    ) -> Tensor:
        self.of[name] = tuple(shape)
        slices = _index(shape, rows=rows, columns=columns)
        return torch.empty(
            [bounds.stop - bounds.start for bounds in slices], dtype=dtype, device="meta"
        )


def warn_of_unused(checkpoint: Checkpoint, used: Set[str]) -> None:
    """Logs the stored tensors that are not in `used`."""
    unused = sorted(name for name in checkpoint.names - used if not _COMPUTED.search(name))
    if unused:
        logger.warning(
            "stored tensors are not used: folder=%s names=%s: config.json describes a model "
            "without them",
            checkpoint.folder, listed(unused),
        )  # fmt: skip


def weights_digest(folder: Path) -> str:
    """Returns a digest of a checkpoint's config and of its files' sizes, heads, tails and some
    blocks between; reading all of a large checkpoint would take minutes."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        last = max(0, size - _SAMPLE_BYTES)
        try:
            with file.open("rb") as content:
                for at in range(_SAMPLES):
                    content.seek(last * at // (_SAMPLES - 1))
                    digest.update(content.read(_SAMPLE_BYTES))
        except PermissionError as error:
            raise _forbidden(file) from error
    return digest.hexdigest()


def _forbidden(file: Path) -> CheckpointError:
    return CheckpointError(
        file=file,
        found="no read permission",
        expected=f"a file that user {os.geteuid()} may read",
    )


def _index(shape: Sequence[int], *, rows: range | None, columns: range | None) -> tuple[slice, ...]:
    index = [slice(0, size) for size in shape]
    for axis, selection in enumerate((rows, columns)):
        if selection is not None:
            index[axis] = slice(selection.start, selection.stop)
    return tuple(index)
