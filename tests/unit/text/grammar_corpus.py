"""Two hundred JSON schemas and forty regular expressions, from simple to nasty.

Texts in them are short, so that a model that writes at random ends most within some hundred tokens.
Every schema is supported; those that are not are the tests' business.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_SHORT: Schema = {"type": "string", "maxLength": 8}
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "duration")
_PATTERNS = (
    r"^[a-z]{3,8}$",
    r"^[A-Z][a-z]{1,6} [A-Z]\.$",
    r"^\+?[0-9]{3}-[0-9]{4}$",
    r"^(red|green|blue)(, (red|green|blue)){0,2}$",
    r"^#[0-9a-f]{6}$",
    r"^v[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}(-rc[0-9])?$",
    r"^[^\"\\]{2,5}$",
    r"^[äöüß]{1,4}$",
    r"^(a|b)*a(a|b){3}c$",
    r"^\s?\S{1,5}$",
)


def _object(properties: Schema, *, required: list[str] | None = None, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


def _scalars() -> Iterator[Schema]:
    yield from ({"type": "boolean"}, {"type": "null"}, {"const": 42}, {"const": {"a": [1, None]}})
    yield from ({"enum": ["a", 'b"c', "d\\e", "f\ng"]}, {"enum": [1, None, True, "x", [], {}]})
    yield {"enum": [f"choice {number}" for number in range(300)]}
    for lower, upper in ((0, 0), (0, 1), (1, 4), (3, 3), (0, 12)):
        yield {"type": "string", "minLength": lower, "maxLength": upper}
    yield from ({"type": "string", "pattern": pattern} for pattern in _PATTERNS)
    yield from ({"type": "string", "format": name} for name in _FORMATS)
    for lower, upper in (
        (0, 9),
        (-5, 5),
        (10, 10),
        (-1000, -10),
        (0, 10**12),
        (-(2**31), 2**31 - 1),
    ):
        yield {"type": "integer", "minimum": lower, "maximum": upper}
    yield {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100}
    yield from (
        {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": n} for n in (2, 7, 25)
    )
    yield {"type": "number", "minimum": 0, "maximum": 1}
    yield {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}
    yield {"type": ["integer", "null"], "minimum": 0, "maximum": 9}
    yield {"type": ["boolean", "null"]}


def _arrays() -> Iterator[Schema]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    for lower, upper in ((0, 0), (0, 1), (1, 3), (2, 2), (0, 6)):
        yield {"type": "array", "items": digit, "minItems": lower, "maxItems": upper}
        yield {"type": "array", "items": _SHORT, "minItems": lower, "maxItems": upper}
    yield {"type": "array", "prefixItems": [digit, _SHORT, {"type": "null"}], "items": False}
    yield {"type": "array", "prefixItems": [digit], "items": _SHORT, "maxItems": 3, "minItems": 1}
    yield {
        "type": "array",
        "items": {"type": "array", "items": digit, "maxItems": 2},
        "maxItems": 3,
    }
    yield {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 4, "maxItems": 4}
    yield {"type": "array", "items": _object({"k": _SHORT, "v": digit}), "maxItems": 3}
    yield {"type": "array", "items": {"anyOf": [digit, {"type": "boolean"}]}, "maxItems": 4}
    inner: Schema = digit
    for _ in range(8):
        inner = {"type": "array", "items": inner, "minItems": 1, "maxItems": 1}
    yield inner


def _objects() -> Iterator[Schema]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    yield _object({})
    for count in (1, 2, 3, 5, 8, 13):
        names = [f"field_{number}" for number in range(count)]
        yield _object(dict.fromkeys(names, digit))
        yield _object(dict.fromkeys(names, digit), required=[])
        yield _object(dict.fromkeys(names, digit), required=names[::2])
    for names in (
        ["a b", "c-d", "e.f"],
        ["", " ", "  "],
        ['quo"te', "back\\slash", "new\nline"],
        ["äöü", "日本", "😀"],
        ["$ref", "type", "properties"],
        ["x" * 60],
        ["a", "aa", "aaa", "aaaa"],
    ):
        yield _object(dict.fromkeys(names, _SHORT))
        yield _object({name: {"type": "boolean"} for name in names}, required=names[:1])
    yield {
        "type": "object",
        "properties": {"id": digit},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    }
    yield {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": digit},
        "additionalProperties": False,
        "maxProperties": 2,
    }
    nested: Schema = digit
    for depth in range(10):
        nested = _object({f"level_{depth}": nested})
        if depth % 3 == 0:
            yield nested
    yield nested
    yield _object({"name": _SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}})
    yield _object(
        {
            "user": _object({"name": _SHORT, "email": {"type": "string", "format": "email"}}),
            "roles": {"type": "array", "items": {"enum": ["admin", "user"]}, "maxItems": 2},
            "active": {"type": "boolean"},
            "since": {"type": "string", "format": "date"},
        }
    )
    yield _object(
        {
            "city": {"enum": ["Berlin", "Paris", "Rome"]},
            "temperature": {"type": "number", "minimum": -50, "maximum": 50},
            "unit": {"const": "celsius"},
        }
    )


def _combinations() -> Iterator[Schema]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    yield {"anyOf": [digit, _SHORT]}
    yield {"anyOf": [_object({"a": digit}), _object({"b": digit}), {"type": "null"}]}
    yield {"oneOf": [{"type": "null"}, _object({"x": digit})]}
    yield {"oneOf": [_object({"kind": {"const": k}, k: digit}) for k in ("cat", "dog", "eel")]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]}
    yield {"allOf": [_object({"a": digit, "b": _SHORT}, required=["a"]), {"required": ["b"]}]}
    yield {
        "$defs": {"d": digit},
        **_object({"x": {"$ref": "#/$defs/d"}, "y": {"$ref": "#/$defs/d"}}),
    }
    yield {
        "$defs": {"node": _object({"v": digit, "next": {"anyOf": [{"type": "null"}, _link()]}})},
        **_link(),
    }
    tree = _object({"v": digit, "kids": {"type": "array", "items": _link(), "maxItems": 2}})
    yield {"$defs": {"node": tree}, **_link()}
    for count in (4, 16, 40):
        yield {"anyOf": [_object({f"k{number}": digit}) for number in range(count)]}
    yield {
        "anyOf": [
            _object({"common": _SHORT, f"only_{number}": digit}, required=["common"])
            for number in range(12)
        ]
    }
    yield _object(
        {"value": {"anyOf": [{"type": t} for t in ("boolean", "null")] + [digit, _SHORT]}}
    )
    yield {"definitions": {"s": _SHORT}, **_object({"s": {"$ref": "#/definitions/s"}})}
    yield _object(
        {
            "tool": {"enum": ["search", "open"]},
            "arguments": {
                "anyOf": [_object({"query": _SHORT}), _object({"page": digit}, required=[])]
            },
        }
    )


def _link() -> Schema:
    return {"$ref": "#/$defs/node"}


def schemas() -> list[Schema]:
    """Returns two hundred schemas: the kinds above, and objects and arrays of them."""
    basic = [*_scalars(), *_arrays(), *_objects(), *_combinations()]
    composed, at = list(basic), 0
    while len(composed) < 200:
        first, second = basic[at % len(basic)], basic[(7 * at + 3) % len(basic)]
        at += 1
        if any("#/" in str(schema) for schema in (first, second)):
            continue  # its references begin at its root
        composed.append(
            _object({"first": first, "second": second})
            if at % 2
            else {"type": "array", "prefixItems": [first, second], "items": False, "minItems": 2}
        )
    return composed[:200]


REGEXES = (
    *(r"yes|no", r"[a-z]{1,10}", r"\d{4}-\d{2}-\d{2}", r"(ab){2,5}", r"a?b?c?d?e?"),
    *(
        r"[A-Z][a-z]+( [A-Z][a-z]+){0,2}\.",
        r"-?(0|[1-9]\d{0,5})(\.\d{1,3})?",
        r"\w{2,6}@\w{2,6}\.com",
    ),
    *(r"(a|b)*a(a|b){4}c", r"(a?){12}b", r"[^ ]{1,6} [^ ]{1,6}", r"((a{1,3}b){1,3}c){1,2}"),
    *(
        r"0x[0-9a-fA-F]{1,8}",
        r"#[0-9a-f]{3}([0-9a-f]{3})?",
        r"(?i)hello|goodbye",
        r"[A-ZÄÖ][a-zäö]{1,5}",
    ),
    *(
        r"[äöü]{1,5}",
        r"(😀|😁){1,3}",
        r"\$\d{1,3}(,\d{3}){0,2}(\.\d\d)?",
        r"(true|false)(,(true|false)){0,3}",
    ),
    *(
        r"\{\"a\": \d\}",
        r"<b>[a-z]{1,5}</b>",
        r"[\s\S]{1,12}",
        r".{3}",
        r"(one|two|three) (cats?|dogs?)",
    ),
    *(
        r"[+-]?\d{1,3}e[+-]?\d",
        r"([01]?\d|2[0-3]):[0-5]\d",
        r"\d{1,3}(\.\d{1,3}){3}",
        r"[a-z]+-\d+",
    ),
    *(
        r"Q: [a-z ]{1,12}\?\nA: [a-z ]{1,12}\.",
        r"(- [a-z]{1,6}\n){1,3}",
        r"\| ([a-z]{1,4} \| ){2}",
        r"x{5,8}",
    ),
    *(
        r"[aeiou][^aeiou\W]{1,3}",
        r"(ha){1,6}!?",
        r"v\d+\.\d+",
        r"\([a-z]{1,3}(, [a-z]{1,3}){0,3}\)",
    ),
    *(r"(GET|POST) /[a-z]{1,6}", r"SELECT [a-z]{1,5} FROM [a-z]{1,5};", r"\"[^\"]{0,8}\""),
)
