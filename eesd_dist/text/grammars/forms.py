"""The kinds of grammars that requests have, as texts for `GrammarCompiler`."""

import json
from collections.abc import Mapping, Sequence

from llguidance import LLMatcher, grammar_from

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars.normal_schema import normal_schema

_WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""Between the parts of JSON, as serialisers write it: a blank, or a new line and its indent. Models
that like blank lines would never end."""


def json_schema(schema: Mapping[str, object], *, whitespace: str | None = _WHITESPACE) -> str:
    """Returns the grammar of JSON that a schema describes (JSON Schema 2020-12, without what
    llguidance does not support; see `normal_schema`). `whitespace`: pattern of what may stand
    between two parts; None: nothing."""
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(normal_schema(schema)[0]),
            overrides={
                "whitespace_flexible": whitespace is not None,
                "whitespace_pattern": whitespace,
            },
        )
    except (ValueError, RecursionError) as error:  # too deep, numbers or characters that JSON lacks
        raise RequestError(f"the schema cannot be read: {error}") from error


def json_rule(schema: Mapping[str, object]) -> str:
    """Returns what stands for `json_schema` in rules for `lark`."""
    spaced = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
    return f"%json {json.dumps({**normal_schema(schema)[0], 'x-guidance': spaced})}"


def any_json() -> str:
    """Returns the grammar of any JSON object."""
    return json_schema({"type": "object"})


def regular_expression(pattern: str) -> str:
    """Returns the grammar of whole texts that match (syntax of the Rust crate regex)."""
    grammar: str = LLMatcher.grammar_from_regex(pattern)
    return grammar


def one_of(texts: Sequence[str]) -> str:
    """Returns the grammar of exactly these texts."""
    grammar: str = grammar_from("choice", json.dumps(list(texts)))
    return grammar


def rules(text: str) -> str:
    """Returns a grammar written in Lark's form or in GBNF."""
    try:
        grammar: str = grammar_from("grammar", text)
    except ValueError as error:
        raise RequestError(f"the grammar cannot be read: {error}") from error
    return grammar


def lark(text: str) -> str:
    """Returns a grammar written in Lark's form, as llguidance extends it."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})
