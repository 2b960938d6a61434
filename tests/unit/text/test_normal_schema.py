"""Schemas as programs write them, with keywords that mean nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars import GrammarCompiler, json_schema, normal_schema
from tests.support.json_codec import json_grammars

Schema = dict[str, Any]
INTEGERS = {"type": "array", "items": {"type": "integer"}}
OBJECT = {"type": "object"}
NEUTRAL: list[tuple[Schema, Schema]] = [
    (INTEGERS | {"uniqueItems": False}, INTEGERS),
    (INTEGERS | {"minContains": 0}, INTEGERS),
    (INTEGERS | {"contains": {"const": 1}, "minContains": 0}, INTEGERS),
    (INTEGERS | {"unevaluatedItems": True}, INTEGERS),
    (OBJECT | {"not": False}, OBJECT),
    (OBJECT | {"propertyNames": {}, "unevaluatedProperties": {}}, OBJECT),
    (OBJECT | {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}}, OBJECT),
    (OBJECT | {"if": {"required": ["a"]}}, OBJECT),
    (OBJECT | {"then": {"required": ["a"]}, "else": {}}, OBJECT),
    ({"type": "string", "maxLength": 3.0}, {"type": "string", "maxLength": 3}),
]
PLACES: list[Callable[[Schema], Schema]] = [
    lambda schema: {"type": "object", "properties": {"a": schema}},
    lambda schema: {"type": "array", "items": schema},
    lambda schema: {"type": "array", "prefixItems": [schema]},
    lambda schema: {"anyOf": [schema, {"type": "null"}]},
    lambda schema: {"$defs": {"a": schema}, "$ref": "#/$defs/a"},
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return json_grammars()


@pytest.mark.parametrize(("schema", "expected"), NEUTRAL)
def test_keywords_that_mean_nothing_are_left_out(
    compiler: GrammarCompiler, schema: Schema, expected: Schema
) -> None:
    assert normal_schema(schema) == (expected, [])
    for embed in PLACES:
        assert normal_schema(embed(schema)) == (embed(expected), [])
        compiler.check(json_schema(embed(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        INTEGERS | {"uniqueItems": True},
        INTEGERS | {"contains": {"const": 1}},
        INTEGERS | {"contains": {"const": 1}, "minContains": 0, "maxContains": 1},
        OBJECT | {"not": {}},
        OBJECT | {"propertyNames": {"pattern": "^a"}},
        OBJECT | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        OBJECT | {"unevaluatedProperties": False},
    ],
)
def test_keywords_that_mean_something_are_refused_by_name(
    compiler: GrammarCompiler, schema: Schema
) -> None:
    assert normal_schema(schema) == (schema, [])
    with pytest.raises(RequestError, match="not supported"):
        compiler.check(json_schema(schema))


def test_values_that_look_like_schemas_stay() -> None:
    schema = {
        "enum": [{"uniqueItems": False}],
        "default": {"format": "color"},
        "properties": {"format": {"type": "string"}, "not": {"const": {"not": False}}},
    }
    assert normal_schema(schema) == (schema, [])


@pytest.mark.parametrize(
    ("schema", "note"),
    [
        ({"type": "string", "format": "color"}, "the format 'color' is not known"),
        ({"type": "number", "maximum": 1e20}, "maximum 1e+20 is too large to be checked"),
        ({"type": "integer", "minimum": -(10**30)}, "too large to be checked"),
        ({"type": "number", "exclusiveMaximum": 1.7976931348623157e308}, "too large"),
    ],
)
def test_what_cannot_be_checked_is_left_out_with_a_note(
    compiler: GrammarCompiler, schema: Schema, note: str
) -> None:
    _, (text,) = normal_schema({"anyOf": [schema, schema]})
    assert note in text
    compiler.check(json_schema(schema))


def test_a_bound_that_small_numbers_would_break_stays(compiler: GrammarCompiler) -> None:
    schema = {"type": "number", "minimum": 1e20}
    assert normal_schema(schema) == (schema, [])
    with pytest.raises(RequestError, match="range"):
        compiler.check(json_schema(schema))


def test_alternatives_that_may_overlap_are_refused_in_our_words(compiler: GrammarCompiler) -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(RequestError, match="use anyOf") as error:
        compiler.check(json_schema(overlapping))
    assert "coerce" not in str(error.value)
