"""Measured times of collective operations: what preflight writes and the planner reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from eesd_dist.errors import ConfigError

Operation = Literal["all_reduce", "broadcast", "sendrecv"]
Scope = Literal["node", "nodes"]
"""All ranks on one node, or on several."""


class CollectiveFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operation among so many ranks, by message size."""

    operation: Operation
    scope: Scope
    num_ranks: int
    backend: Literal["nccl", "gloo"]
    times: tuple[tuple[int, float], ...]
    """(bytes, seconds) by increasing size; of sendrecv one way, of the others one call."""


class LinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The `links` of a preflight report; other keys of the report are ignored."""

    links: tuple[CollectiveFigures, ...]


def write_links(links: Sequence[CollectiveFigures]) -> list[object]:
    """Returns the value of the key `links` of a JSON report."""
    written: list[object] = msgspec.to_builtins(links)
    return written


def read_links(path: Path) -> tuple[CollectiveFigures, ...]:
    """Reads the figures of `eesd preflight --json`. Raises ConfigError for another file, and for a
    report without links."""
    try:
        links = msgspec.json.decode(path.read_bytes(), type=LinkFigures).links
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: expected the JSON of preflight") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}: expected the JSON of `eesd preflight`") from error
    if not links:
        raise ConfigError(
            f"{path}: found no measured links: run `eesd preflight --address auto --json` on the "
            "cluster, without --skip-links"
        )
    return links
