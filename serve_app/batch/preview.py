"""Rows of a dry run: those that a batch would run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from eesd_dist.errors import RequestError
from serve_app.batch.inputs import Inputs
from serve_app.batch.loop import Bodies
from serve_app.batch.rows import Row

_NUM_EXAMPLES = 3
_MAX_TEXTS = 1024
"""Texts of a row that count: more are refused anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Rows that a job would run."""

    num_rows: int
    num_invalid: int
    """Rows that cannot be run, as far as can be seen without the model."""
    problems: tuple[str, ...]
    """Reasons of the first of them."""
    max_tokens: int
    """Tokens that the others ask for at most; rows without a limit count with the default."""
    unused_columns: tuple[str, ...]


def preview_of(rows: Iterator[Row], bodies: Bodies, inputs: Inputs) -> Preview:
    """Returns what the rows ask for. Raises ConfigError if the input changes while it is read."""
    num_rows = num_invalid = max_tokens = 0
    problems: list[str] = []
    for row in rows:
        num_rows += 1
        try:
            body = bodies(row)
        except RequestError as error:
            num_invalid += 1
            if len(problems) < _NUM_EXAMPLES:
                problems.append(f"{row.custom_id}: {error}")
        else:
            number = body.get("n")
            num_texts = number if isinstance(number, int) and 1 < number <= _MAX_TEXTS else 1
            max_tokens += num_texts * replace(row, body=body).max_tokens
    return Preview(
        num_rows=num_rows,
        num_invalid=num_invalid,
        problems=tuple(problems),
        max_tokens=max_tokens,
        unused_columns=inputs.unused_columns,
    )
