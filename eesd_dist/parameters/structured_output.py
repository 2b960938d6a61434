"""Fields that say what an answer has to look like, and the grammar that they mean.

OpenAI's `response_format`, and vLLM's `structured_outputs` and its older names `guided_*`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from eesd_dist.errors import RequestError
from eesd_dist.parameters.fields import MAX_ENTRIES, Fields
from eesd_dist.text.grammars import (
    json_schema,
    normal_schema,
    one_of,
    regular_expression,
    rules,
)

JsonObject = dict[str, Any]
Schema = JsonObject | str
"""A JSON schema, also as text."""
Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)]


class JsonSchema(Fields):
    """`response_format.json_schema`."""

    name: str = ""
    """Name for the client only."""
    description: str = ""
    schema_: JsonObject | None = Field(default=None, alias="schema")
    """Absent: any JSON object."""
    strict: bool = True
    """The answer always matches, whatever this says."""


class ResponseFormat(Fields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`: one of the first five."""

    model_config = ConfigDict(extra="forbid")

    json_: Schema | None = Field(default=None, alias="json")
    """A JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: Text | None = None
    """A regular expression that the whole answer matches."""
    choice: Choices | None = None
    """The answer is one of these."""
    grammar: Text | None = None
    """Grammar in Lark's form or in GBNF."""
    whitespace_pattern: Text | None = None
    """Regular expression of what may stand between the parts of JSON; by default a blank, or a new
    line and its indent."""
    disable_any_whitespace: bool = False
    """Nothing stands there."""


class StructuredFields(BaseModel):
    """The fields of a request that say what its answer has to look like: one kind at most."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    response_format: ResponseFormat | None = None
    """`{"type": "text"}`, `json_object` or `json_schema`."""
    structured_outputs: StructuredOutputs | None = None
    """Object with one of `json`, `json_object`, `regex`, `choice`, `grammar`."""
    guided_json: Schema | None = None
    """Alias of `structured_outputs.json`."""
    guided_regex: Text | None = None
    """Alias of `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """Alias of `structured_outputs.choice`."""
    guided_grammar: Text | None = None
    """Alias of `structured_outputs.grammar`."""
    guided_whitespace_pattern: Text | None = None
    """Alias of `structured_outputs.whitespace_pattern`."""


class AskedGrammar(NamedTuple):
    param: str
    """The field that asks for it."""
    grammar: str
    notes: tuple[str, ...] = ()
    """Parts of it that are not obeyed, for the client."""


def has_grammar(fields: StructuredFields) -> bool:
    """Returns whether `asked_grammar` has something to do."""
    is_text = fields.response_format is not None and fields.response_format.type == "text"
    names = fields.model_fields_set & StructuredFields.model_fields.keys()
    return bool(names - {"response_format"} if is_text else names)


class _GrammarField(NamedTuple):
    param: str
    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any


def asked_grammar(fields: StructuredFields) -> AskedGrammar | None:
    """Returns the grammar that a request asks for; None for any text. Raises RequestError."""
    grammars = list(_grammar_fields(fields))
    if not grammars:
        return None
    if len(grammars) > 1:
        names = " and ".join(grammar.param for grammar in grammars)
        raise RequestError(f"found {names}, expected one of them", param=grammars[1].param)
    ((param, kind, value),) = grammars
    with naming(param):
        grammar = _grammar(kind, value, whitespace=_whitespace(fields))
        notes = normal_schema(_parsed(value))[1] if kind == "json" else []
    return AskedGrammar(param, grammar, tuple(f"{param}: {note}" for note in notes))


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Names the field in errors about its grammar."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            raise
        raise RequestError(f"{param}: {error}", param=param) from error


def _grammar_fields(fields: StructuredFields) -> Iterator[_GrammarField]:
    response_format = fields.response_format
    if response_format is not None and response_format.type == "json_object":
        yield _GrammarField("response_format", "json", {"type": "object"})
    if response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise RequestError(
                "response_format.json_schema is missing: send the schema, or type: json_object",
                param="response_format.json_schema",
            )
        schema = response_format.json_schema.schema_
        yield _GrammarField(
            "response_format.json_schema.schema",
            "json",
            {"type": "object"} if schema is None else schema,
        )
    inner = fields.structured_outputs
    if inner is not None and inner.json_object:
        yield _GrammarField("structured_outputs.json_object", "json", {"type": "object"})
    for kind, new, old in (
        ("json", None if inner is None else inner.json_, fields.guided_json),
        ("regex", None if inner is None else inner.regex, fields.guided_regex),
        ("choice", None if inner is None else inner.choice, fields.guided_choice),
        ("grammar", None if inner is None else inner.grammar, fields.guided_grammar),
    ):
        if new is not None:
            yield _GrammarField(f"structured_outputs.{kind}", kind, new)  # type: ignore[arg-type]
        if old is not None:
            yield _GrammarField(f"guided_{kind}", kind, old)  # type: ignore[arg-type]


def _whitespace(fields: StructuredFields) -> dict[str, str | None]:
    """Returns the option of `json_schema`; empty for its default."""
    inner = fields.structured_outputs
    if inner is not None and inner.disable_any_whitespace:
        return {"whitespace": None}
    pattern = fields.guided_whitespace_pattern
    if inner is not None and inner.whitespace_pattern is not None:
        pattern = inner.whitespace_pattern
    return {} if pattern is None else {"whitespace": pattern}


def _grammar(kind: str, value: Any, *, whitespace: dict[str, str | None]) -> str:
    if kind == "regex":
        return regular_expression(value)
    if kind == "choice":
        return one_of(value)
    if kind == "grammar":
        return rules(value)
    return json_schema(_parsed(value), **whitespace)


def _parsed(schema: Schema) -> JsonObject:
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"found no JSON ({error}), expected a JSON schema") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"found a JSON {type(parsed).__name__}, expected an object")
    return parsed
