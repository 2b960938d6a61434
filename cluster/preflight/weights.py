"""Reads the weights of a node, as far as needed to compare them with those of other nodes.

Torch is imported where they are read: the driver uses the result alone.
"""

from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import EesdError, os_error_text

DIGITS = 12
"""Digits of a digest in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFacts:
    """A model's folder on one node."""

    folder: str
    digest: str | None
    """None if it cannot be read."""
    problem: str | None
    """Reason why it cannot be read; None if it can."""


def read_weights(model: Path, *, head: Path | None = None) -> WeightsFacts:
    """Digests config and safetensors files by sampled blocks, and the exit head as a whole."""
    from eesd_dist.model.heads.head_config import head_digest
    from eesd_dist.model.weights import weights_digest

    folder = model.expanduser()
    try:
        problem = _missing(folder)
        if problem is not None:
            return WeightsFacts(folder=str(folder), digest=None, problem=problem)
        digest = weights_digest(folder)
        if head is not None:
            folder = head.expanduser()
            if not folder.is_dir():
                missing = "there is no such folder of an exit head"
                return WeightsFacts(folder=str(folder), digest=None, problem=missing)
            digest += head_digest(folder)
    except OSError as error:
        return WeightsFacts(folder=str(folder), digest=None, problem=os_error_text(error))
    except EesdError as error:
        return WeightsFacts(folder=str(folder), digest=None, problem=str(error))
    return WeightsFacts(folder=str(folder), digest=digest, problem=None)


def _missing(folder: Path) -> str | None:
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    if not any(folder.glob("*.safetensors")):
        return "it has no *.safetensors file"
    return None
