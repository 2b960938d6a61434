"""Rules that all JSON objects of requests have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

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
