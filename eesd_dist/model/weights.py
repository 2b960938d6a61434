"""Tensors out of safetensors folders, and only the parts that are asked for.

Decides where a tensor of a checkpoint lies (one file or many with an index) and that it is what it
has to be; everything else is a CheckpointError with file, found and expected. Knows no model.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eesd_dist.errors import CheckpointError
from eesd_dist.model.spec import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _OpenFile(Protocol):
    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """One folder of weights, opened lazily file by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _OpenFile] = {}
        self._file_of = _locate(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()  # closes them: nothing else holds the handles

    def __contains__(self, name: str) -> bool:
        if self._file_of is None:
            return name in self._open(SINGLE_FILE).keys()  # noqa: SIM118  not a dict
        return name in self._file_of

    def read(
        self,
        name: str,
        *,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype,
    ) -> Tensor:
        """A float tensor of this shape, or its rows and columns only."""
        file, found = self._slice(name)
        self._require(name, file, found, tuple(shape))
        if found.get_dtype() not in _FLOATS:
            raise CheckpointError(
                file=self.folder / file,
                found=f"{name} of type {found.get_dtype()}",
                expected=f"one of {', '.join(_FLOATS)}",
            )
        index = [slice(0, size) for size in shape]
        if rows is not None:
            index[0] = slice(rows.start, rows.stop)
        if columns is not None:
            index[1] = slice(columns.start, columns.stop)
        try:
            return found[tuple(index)].to(dtype)
        except SafetensorError as error:
            raise self._unreadable(file, error) from error

    def read_raw(self, name: str, *, shape: Sequence[int]) -> Tensor:
        """A whole tensor as it was stored (index maps and the like)."""
        file, found = self._slice(name)
        self._require(name, file, found, tuple(shape))
        try:
            return self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise self._unreadable(file, error) from error

    def _slice(self, name: str) -> tuple[str, _Slice]:
        if name not in self:
            raise CheckpointError(
                file=self.folder, found=f"no tensor {name}", expected="it in the safetensors"
            )
        file = SINGLE_FILE if self._file_of is None else self._file_of[name]
        try:
            return file, self._open(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                file=self.folder / file,
                found=f"no tensor {name} ({error})",
                expected="it, as the index says",
            ) from error

    def _require(self, name: str, file: str, found: _Slice, shape: tuple[int, ...]) -> None:
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                file=self.folder / file,
                found=f"{name} of shape {tuple(found.get_shape())}",
                expected=f"{shape} as config.json implies",
            )

    def _open(self, file: str) -> _OpenFile:
        if file not in self._files:
            path = self.folder / file
            try:
                opened: _OpenFile = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(
                    file=path, found="no such file", expected="a shard that the index names"
                ) from None
            except (SafetensorError, OSError) as error:
                raise self._unreadable(file, error) from error
            self._files[file] = opened
        return self._files[file]

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            file=self.folder / file,
            found=f"unreadable content ({error})",
            expected="a whole safetensors file",
            advice="copy it again; it is probably cut short",
        )


def _locate(folder: Path) -> dict[str, str] | None:
    """Which file holds each tensor; None when there is one file for all."""
    if (folder / SINGLE_FILE).exists():
        return None
    if not (folder / INDEX_FILE).exists():
        raise CheckpointError(
            file=folder, found="no safetensors", expected=f"{SINGLE_FILE} or {INDEX_FILE}"
        )
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            file=folder / INDEX_FILE, found="no weight_map", expected="tensor names to files"
        )
    return {str(name): str(file) for name, file in weight_map.items()}
