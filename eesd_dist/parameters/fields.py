"""Rules that all JSON objects of requests have in common, before and after they are parsed."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from eesd_dist.errors import RequestError

MAX_ENTRIES = 1024
"""Fields of an object, entries of `logit_bias`, `stop_token_ids` and choices."""


def check_number(entries: object) -> object:
    """Runs before the entries are checked: describing thousands of wrong ones takes seconds."""
    if isinstance(entries, Mapping) and len(entries) > MAX_ENTRIES:
        raise ValueError(f"found {len(entries)} entries, expected at most {MAX_ENTRIES}")
    return entries


def _whole(value: object) -> object:
    """Languages with one kind of number write 1.0 for 1, or the other way round."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Fields(BaseModel):
    """A JSON object in which null means the default, and 1.0 is a whole number."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    null_is_a_value: ClassVar[frozenset[str]] = frozenset()
    """Fields of which null does not mean the default."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        check_number(data)
        if not isinstance(data, Mapping):
            return data
        return {
            name: _whole(value) if name in cls.model_fields else value
            for name, value in data.items()
            if value is not None or name in cls.null_is_a_value
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Says of every field that may be left out that it may be null."""
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        required = resolved.get("required", ())
        resolved["properties"] = {
            name: field if name in required else _or_null(field)
            for name, field in resolved.get("properties", {}).items()
        }
        return schema


_OF_FIELDS = ("title", "description", "default", "deprecated", "examples")
_NULL = {"type": "null"}


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    kinds = field.get("anyOf", ())
    if _NULL in kinds:
        return field
    outer = {name: field[name] for name in _OF_FIELDS if name in field}
    inner = {name: value for name, value in field.items() if name not in _OF_FIELDS}
    if kinds:
        return field | {"anyOf": [*kinds, _NULL]}
    return {"anyOf": [inner, _NULL], **outer}


_MAX_JSON_CONTAINERS = 16_384
"""Four for each message of the longest conversation. Parsing a million takes a second."""
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""Matches from every quotation mark, to the end if need be: time is linear in the body."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Opening brackets are 1 and closing ones -1 as 8-bit integers."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json(body: bytes | bytearray, *, max_depth: int) -> None:
    """Raises RequestError for JSON with too many lists and objects, or too deep ones, without
    parsing it."""
    if b"\0" in body:
        raise RequestError("found a NUL byte in the body, expected JSON in UTF-8")
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    brackets = _JSON_STRING.sub(b"", body).translate(_STEPS, _NOT_BRACKETS)
    steps = np.frombuffer(brackets, np.int8)
    num_opened = int((steps > 0).sum())
    if num_opened > _MAX_JSON_CONTAINERS:
        raise RequestError(
            f"found {num_opened} lists and objects in the body, expected at most "
            f"{_MAX_JSON_CONTAINERS}: send several requests"
        )
    depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
    if depth > max_depth:
        raise RequestError(
            f"the body is nested {depth} levels deep, expected at most {max_depth}: send flatter "
            "JSON"
        )
