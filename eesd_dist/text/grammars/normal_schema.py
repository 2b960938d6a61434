"""Writes a JSON schema without what means nothing, before a compiler that refuses it reads it.

Programs write schemas with keywords at their neutral values (`uniqueItems: false`), with counts as
decimals and with formats of their own. `normal_schema` says the same without them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
Notes = list[str]

_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time"),
        *("unknown", "uri", "uuid"),
    }
)
"""Formats that llguidance knows."""
_ONE = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_MANY = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_COUNTS = frozenset(
    {
        *("maxContains", "maxItems", "maxLength", "maxProperties"),
        *("minContains", "minItems", "minLength", "minProperties"),
    }
)
_FARTHEST = 2**63 - 1
"""The compiler states no bound beyond."""
_MAX_SHOWN_CHARS = 40


def normal_schema(schema: Schema) -> tuple[dict[str, Any], list[str]]:
    """Returns the schema in a form that compiles where it can, and a sentence for each keyword that
    is not obeyed: a format that is not known, and bounds that few numbers reach.

    Raises RecursionError for a schema that is too deep.
    """
    notes: Notes = []
    return _normal(schema, notes), list(dict.fromkeys(notes))


def _normal(schema: Schema, notes: Notes) -> dict[str, Any]:
    normal = {
        name: _value(name, value, notes)
        for name, value in schema.items()
        if not _is_neutral(name, value, schema)
    }
    for name in [name for name in normal if _is_out_of_reach(name, normal[name])]:
        notes.append(f"{name} {normal.pop(name)!r:.{_MAX_SHOWN_CHARS}} is too large to be checked")
    text_format = normal.get("format")
    if isinstance(text_format, str) and text_format not in _FORMATS:
        notes.append(f"the format {text_format!r:.{_MAX_SHOWN_CHARS}} is not known")
        del normal["format"]
    return normal


def _value(name: str, value: Any, notes: Notes) -> Any:
    if name in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in _NAMED and isinstance(value, Mapping):
        return {key: _inner(inner, notes) for key, inner in value.items()}
    if name in _MANY and isinstance(value, list):
        return [_inner(inner, notes) for inner in value]
    return _inner(value, notes) if name in _ONE else value


def _inner(schema: Any, notes: Notes) -> Any:
    return _normal(schema, notes) if isinstance(schema, Mapping) else schema


def _is_neutral(name: str, value: Any, schema: Schema) -> bool:
    rule = _NEUTRAL.get(name)
    return rule is not None and rule(value, schema)


def _is_out_of_reach(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) == math.inf:
        return False
    if name in ("maximum", "exclusiveMaximum"):
        return value > _FARTHEST
    return name in ("minimum", "exclusiveMinimum") and value < -_FARTHEST


def _is_any(value: Any, _: Schema) -> bool:
    return value is True or value == {}


def _is_off(value: Any, _: Schema) -> bool:
    return value is False


def _is_empty(value: Any, _: Schema) -> bool:
    return isinstance(value, Mapping) and not value


def _counts_nothing(_: Any, schema: Schema) -> bool:
    """Returns True if no item has to be among those that are counted."""
    return "contains" not in schema or (
        schema.get("minContains") == 0 and "maxContains" not in schema
    )


def _decides_nothing(_: Any, schema: Schema) -> bool:
    return "if" not in schema or not ("then" in schema or "else" in schema)


_NEUTRAL: Mapping[str, Callable[[Any, Schema], bool]] = {
    "contains": _counts_nothing,
    "dependencies": _is_empty,
    "dependentRequired": _is_empty,
    "dependentSchemas": _is_empty,
    "else": _decides_nothing,
    "if": _decides_nothing,
    "maxContains": _counts_nothing,
    "minContains": _counts_nothing,
    "not": _is_off,
    "propertyNames": _is_any,
    "then": _decides_nothing,
    "unevaluatedItems": _is_any,
    "unevaluatedProperties": _is_any,
    "uniqueItems": _is_off,
}
