"""End tokens of a checkpoint, as its files name them."""

import logging
from collections.abc import Mapping
from pathlib import Path

from eesd_dist.errors import CheckpointError

logger = logging.getLogger(__name__)


def end_token_ids(entries: Mapping[Path, object], *, vocab_size: int) -> list[int]:
    """Returns the ids that the files name, each once, in the order of the files.

    Some checkpoints name ids outside the vocabulary next to valid ones: these can never be
    generated, and are left out with a warning. Raises CheckpointError for values that are no ids,
    and if all are outside.
    """
    by_file = {file: _ids(value, file) for file, value in entries.items()}
    valid = [id_ for ids in by_file.values() for id_ in ids if 0 <= id_ < vocab_size]
    for file, ids in by_file.items():
        outside = [id_ for id_ in ids if not 0 <= id_ < vocab_size]
        if outside and not valid:
            raise CheckpointError(
                file=file,
                found=f"eos_token_id {_listed(outside)} and no end token in the vocabulary",
                expected=f"at least one id below the vocabulary of {vocab_size}",
                advice="name the model's end token, or no eos_token_id if it has none",
            )
        if outside:
            logger.warning(
                "end tokens outside the vocabulary are left out: file=%s ids=%s vocab_size=%d",
                file, _listed(outside), vocab_size,
            )  # fmt: skip
    return list(dict.fromkeys(valid))


def _ids(value: object, file: Path) -> list[int]:
    if value is None:
        return []
    entries = value if isinstance(value, list) else [value]
    ids = [id_ for id_ in entries if type(id_) is int]
    if len(ids) < len(entries):
        raise CheckpointError(
            file=file, found=f"eos_token_id {value!r:.200}", expected="an id or a list of ids"
        )
    return ids


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8]))
