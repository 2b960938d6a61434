"""Reads the rows of a batch: OpenAI's batch lines, or plain bodies.

A row is parsed into an id, a kind and a body, or a reason why it cannot be run; a bad row does not
stop the others. A row without an id is named after its line.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import ConfigError, RequestError
from serve_app.openai.workloads import Kind

URL_OF_KIND: Mapping[Kind, str] = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_KIND_OF_URL = {url: kind for kind, url in URL_OF_KIND.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Line of the input."""

    custom_id: str
    line_number: int
    digest: str
    """Tells whether the line has changed since an earlier run."""
    kind: Kind = "completion"
    body: Mapping[str, object]
    problem: RequestError | None = None
    """Reason why it cannot be run; None if it can."""


def rows_of(file: Path) -> Iterator[Row]:
    """Yields rows as the file is read; skips empty lines. Raises ConfigError if it cannot be
    read."""
    try:
        with file.open("rb") as lines:
            for line_number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(line, line_number)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}): name a JSONL file"
        ) from error


def checked_digests(file: Path) -> dict[str, str]:
    """Returns digests by id, in the file's order. Raises ConfigError for an id that is repeated."""
    digests: dict[str, str] = {}
    lines: dict[str, int] = {}
    for row in rows_of(file):
        if row.custom_id in digests:
            raise ConfigError(
                f"{file}: custom_id '{row.custom_id}' is in lines {lines[row.custom_id]} and "
                f"{row.line_number}: ids have to be unique, since results are found by them"
            )
        digests[row.custom_id] = row.digest
        lines[row.custom_id] = row.line_number
    return digests


def _row(line: bytes, line_number: int) -> Row:
    digest = hashlib.sha256(line.strip()).hexdigest()[:16]
    custom_id = f"line-{line_number}"
    body: Mapping[str, object] = {}
    kind: Kind = "completion"
    problem: RequestError | None = None
    try:
        content = _content(line)
        custom_id = _custom_id(content) or custom_id
        kind, body = _batch_body(content) if "body" in content else _plain_body(content)
    except RequestError as error:
        problem = error
    return Row(
        custom_id=custom_id,
        line_number=line_number,
        digest=digest,
        kind=kind,
        body=body,
        problem=problem,
    )


def _content(line: bytes) -> dict[str, object]:
    try:
        content = json.loads(line)
    # RecursionError: a line of brackets, nested deeper than the parser goes.
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError(f"the line is a JSON {type(content).__name__}, not an object")
    return content


def _custom_id(content: Mapping[str, object]) -> str | None:
    custom_id = content.get("custom_id", content.get("id"))
    if custom_id is None:
        return None
    if isinstance(custom_id, bool) or not isinstance(custom_id, str | int) or custom_id == "":
        raise RequestError("custom_id has to be a text or a whole number", param="custom_id")
    return str(custom_id)


def _batch_body(content: Mapping[str, object]) -> tuple[Kind, Mapping[str, object]]:
    """Reads OpenAI's form: {"custom_id", "method", "url", "body"}."""
    body = content["body"]
    if not isinstance(body, dict):
        raise RequestError("body has to be a JSON object", param="body")
    if content.get("custom_id") is None:
        raise RequestError("a row with a body needs a custom_id", param="custom_id")
    if content.get("method", "POST") != "POST":
        raise RequestError(f"method is {content['method']}, has to be `POST`", param="method")
    url = content.get("url")
    if not isinstance(url, str) or url not in _KIND_OF_URL:
        raise RequestError(f"url is {url}, has to be one of {sorted(_KIND_OF_URL)}", param="url")
    return _KIND_OF_URL[url], body


def _plain_body(content: Mapping[str, object]) -> tuple[Kind, Mapping[str, object]]:
    """Reads the short form: the fields of the body, and an optional id."""
    if ("prompt" in content) == ("messages" in content):
        raise RequestError("a row needs either prompt or messages", param="prompt")
    body = {name: value for name, value in content.items() if name not in ("id", "custom_id")}
    return ("chat" if "messages" in content else "completion"), body
