"""Finds the backend of a device: its package in `eesd_dist.backends`.

Code outside of that package does not ask a tensor where it is. What a device does in its own way is
in its backend, in parts: `sampling`, `model` and `engine`. Modules below the backends, which these
use, state the protocol of what they need of one, and find it by name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import torch

HOST = torch.device("cpu")
"""The memory that processes of a machine exchange bytes in, whatever computes."""
_PACKAGES: Mapping[str, str] = {
    "cpu": "eesd_dist.backends.cpu",
    "cuda": "eesd_dist.backends.cuda",
}
"""Packages with a `BACKEND`, by type of device. A new device is a package and a line here."""


class Backend(Protocol):
    """Parts that one type of device does in its own way."""

    @property
    def sampling(self) -> Any:
        """Implements `sampling.backend.SamplingBackend`."""
        ...

    @property
    def model(self) -> Any:
        """Implements the protocols of `model`: `RowsBackend`, `ProductBackend`, `NormBackend`,
        `PagesBackend`, `LayersBackend`, `LogitsBackend` and `AnswersBackend`."""
        ...

    @property
    def engine(self) -> Any:
        """Implements `backends.api.EngineBackend`."""
        ...


_backends: dict[str, Backend] = {}


def backend_of(device: torch.device) -> Backend:
    """Returns the backend of a device, which is imported at the first call."""
    backend = _backends.get(device.type)
    if backend is None:
        backend = _backends[device.type] = import_module(_PACKAGES[device.type]).BACKEND
    return backend


@contextmanager
def replaced_backend(device_type: str, backend: Backend) -> Iterator[None]:
    """Uses another backend for a type of device within the block, in all threads; for tests."""
    before = backend_of(torch.device(device_type))
    _backends[device_type] = backend
    try:
        yield
    finally:
        _backends[device_type] = before
