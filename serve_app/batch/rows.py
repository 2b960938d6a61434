"""Rows of a batch: what a line or a table's row asks for.

A row is OpenAI's batch line, a plain body with an optional id, or the columns of a table. It is
read into an id, a kind and a body, or the reason why it cannot be run: a bad row stops no other.
Which files rows come from is the business of `serve_app.batch.inputs`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from eesd_dist.errors import RequestError
from serve_app.openai.schema import ChatFields, CompletionFields
from serve_app.openai.workloads import Kind

URL_OF_KIND: Mapping[Kind, str] = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_KIND_OF_URL = {url: kind for kind, url in URL_OF_KIND.items()}
_ID_NAMES = ("custom_id", "id")
_BODY_NAMES = frozenset({*CompletionFields.model_fields, *ChatFields.model_fields})
COLUMNS = frozenset({*_ID_NAMES, "sampling_params", *_BODY_NAMES})
"""Columns of a table that a row is made of."""
_MAX_ID_CHARS = 512
_MAX_DEPTH = 100
"""Levels of a row: rows travel between processes, and deeper ones are no requests."""
_DIGEST_DIGITS = 16

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """Row as it is in a file."""

    location: str
    """The file, and the line or row in it."""
    content: bytes | Mapping[str, object]
    """A line, or the columns of a table by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the input. `custom_id` is its own, or made of its content by `named`."""

    custom_id: str = ""
    digest: str
    """Hexadecimal digits of the content's hash: equal contents have equal digests."""
    kind: Kind = "completion"
    body: Body
    problem: RequestError | None = None
    """Reason why it cannot be run; None if it can."""
    ordinal: int = 0
    """Number of rows before it in the input."""

    def named(self, occurrence: int, *, ordinal: int) -> "Row":
        """Returns the row with its number and an id. Without one of its own that is made of its
        content, and of the number of equal rows before it: it stays the same however the input is
        cut."""
        suffix = f"-{occurrence + 1}" if occurrence else ""
        custom_id = self.custom_id or f"row-{self.digest}{suffix}"
        return replace(self, custom_id=custom_id, ordinal=ordinal)

    def with_fields(self, fields: Mapping[str, object]) -> "Row":
        """Returns the row with more fields in its body, where it does not set them."""
        return replace(self, body={**fields, **self.body})

    @property
    def num_characters(self) -> int:
        """Approximate size of the prompt."""
        prompt = self.body.get("messages", self.body.get("prompt", ""))
        return len(prompt if isinstance(prompt, str) else str(prompt))

    @property
    def num_expected_tokens(self) -> float:
        """Tokens that the row is expected to cost at most, in those of an answer: a token of the
        prompt is cheaper."""
        return self.num_characters / _PROMPT_CHARACTERS + self.max_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of the answer at most; without a limit of its own a default."""
        limit = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        number = limit if isinstance(limit, int | float) else _DEFAULT_TOKENS[self.kind]
        return int(min(max(0, number), _MAX_TOKENS))  # whatever a row asks for, also not a number

    @property
    def prefix(self) -> str:
        """Beginning of the prompt, which rows with the same instructions share."""
        prompt = self.body.get("messages", self.body.get("prompt", ""))
        if isinstance(prompt, list) and prompt:
            prompt = prompt[0]
        return (prompt if isinstance(prompt, str) else str(prompt))[:_PREFIX_CHARACTERS]


_DEFAULT_TOKENS: Mapping[Kind, int] = {"completion": 16, "chat": 512}
_MAX_TOKENS = 2**20
_PROMPT_CHARACTERS = 32
"""Characters of a prompt that cost as much as one generated token: eight tokens of four."""
_PREFIX_CHARACTERS = 256


def row_seed(seed: int, custom_id: str) -> int:
    """Returns a row's seed: the same in every run, another for every id."""
    key = f"batch {seed} {custom_id}".encode(errors="backslashreplace")  # allows half surrogates
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")


def row_of(raw: RawRow) -> Row:
    """Returns the row that a line, or a table's row, asks for."""
    if isinstance(raw.content, bytes):
        row = _row_of_line(raw.content.strip())
    else:
        row = _row_of_table(raw.content)
    if row.problem is None or row.custom_id:
        return row
    problem = RequestError(f"{raw.location}: {row.problem}", param=row.problem.param)
    return replace(row, problem=problem)


def row_of_columns(columns: Mapping[str, object], *, requires: str) -> Row:
    """Returns the row of a dataset. `requires`: the column that its prompt is in, where that is
    settled; `tokenized_prompt` is one of token ids."""
    digest = _digest(_canonical(columns))
    own_id = next((columns[name] for name in _ID_NAMES if name in columns), "")
    custom_id = str(own_id) if isinstance(own_id, str | int) else ""
    tokens = columns.get("tokenized_prompt")
    content = {name: value for name, value in columns.items() if name != "tokenized_prompt"}
    if tokens is not None:
        content = {**content, "prompt": tokens}
        content.pop("messages", None)
    try:
        if requires and requires not in columns:
            raise RequestError(
                f"{requires}: found {', '.join(columns) or 'no column'}, expected a column "
                f"{requires}, since the processor's earlier stages are off",
                param=requires,
            )
        kind, body = _plain_body(content)
    except RequestError as error:
        row = Row(custom_id=custom_id, digest=digest, body={}, problem=error)
    else:
        row = Row(custom_id=custom_id, digest=digest, kind=kind, body=body)
    return row.named(0, ordinal=0)


def _row_of_line(line: bytes) -> Row:
    digest, custom_id = _digest(line), ""
    try:
        content = _json_object(line)
        custom_id = _custom_id(content)
        kind, body = _batch_body(content) if "body" in content else _plain_body(content)
    except RequestError as error:
        return Row(custom_id=custom_id, digest=digest, body={}, problem=error)
    return Row(custom_id=custom_id, digest=digest, kind=kind, body=body)


def _row_of_table(columns: Mapping[str, object]) -> Row:
    content = {
        name: _without_nulls(value)
        for name, value in columns.items()
        if name in COLUMNS and value is not None
    }
    digest, custom_id = _digest(_canonical(content)), ""
    try:
        custom_id = _custom_id(content)
        kind, body = _plain_body({n: _from_text(n, value) for n, value in content.items()})
    except RequestError as error:
        return Row(custom_id=custom_id, digest=digest, body={}, problem=error)
    return Row(custom_id=custom_id, digest=digest, kind=kind, body=body)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_DIGITS]


def _canonical(content: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(content, enc_hook=str, order="sorted")


def _json_object(line: bytes) -> dict[str, object]:
    try:
        content = json.loads(line)
    # RecursionError: a line of brackets, nested deeper than the parser goes.
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError(f"the line is a JSON {type(content).__name__}, not an object")
    if line.count(b"{") + line.count(b"[") > _MAX_DEPTH and _depth(content) > _MAX_DEPTH:
        raise RequestError(f"the line is nested deeper than {_MAX_DEPTH} levels")
    return content


def _depth(content: object) -> int:
    """Returns the levels of a JSON value."""
    depth, level = 0, [content]
    while level:
        depth += 1
        entries: list[object] = []
        for value in level:
            if isinstance(value, dict):
                entries += value.values()
            elif isinstance(value, list):
                entries += value
        level = [entry for entry in entries if isinstance(entry, dict | list)]
    return depth


def _custom_id(content: Mapping[str, object]) -> str:
    """Returns the id of a row; an empty text where it has none."""
    custom_id = next((content[name] for name in _ID_NAMES if content.get(name) is not None), None)
    if custom_id is None:
        return ""
    if isinstance(custom_id, bool) or not isinstance(custom_id, str | int) or custom_id == "":
        raise RequestError("custom_id has to be a text or a whole number", param="custom_id")
    if len(str(custom_id)) > _MAX_ID_CHARS:
        raise RequestError(
            f"custom_id has {len(str(custom_id))} characters, expected at most {_MAX_ID_CHARS}",
            param="custom_id",
        )
    return str(custom_id)


def _batch_body(content: Mapping[str, object]) -> tuple[Kind, Body]:
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


def _plain_body(content: Mapping[str, object]) -> tuple[Kind, Body]:
    """Reads the short form: the fields of the body, or some of them under `sampling_params` as in
    Ray Data, and an optional id."""
    if ("prompt" in content) == ("messages" in content):
        raise RequestError("a row needs either prompt or messages", param="prompt")
    parameters = content.get("sampling_params", {})
    if not isinstance(parameters, Mapping):
        raise RequestError("sampling_params has to be an object", param="sampling_params")
    own = {
        name: value
        for name, value in content.items()
        if name not in _ID_NAMES and name != "sampling_params"
    }
    return ("chat" if "messages" in content else "completion"), {**parameters, **own}


def _without_nulls(value: object) -> object:
    """Returns the value without the fields that are null: in a table, structs of one column have
    the fields of all its rows."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value


def _from_text(name: str, value: object) -> object:
    """Returns what a text in a table stands for: all but ids and prompts is written as JSON there,
    or is a text."""
    if not isinstance(value, str) or name in (*_ID_NAMES, "prompt"):
        return value
    try:
        return cast("object", json.loads(value))
    except (ValueError, RecursionError):
        return value
