"""What all JSON objects of requests have in common."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, model_validator

MAX_ENTRIES = 1024
"""Fields of an object, entries of `logit_bias`, `stop_token_ids` and choices."""


def check_number(entries: object) -> object:
    """Runs before the entries are checked: describing thousands of wrong ones takes seconds."""
    if isinstance(entries, Mapping) and len(entries) > MAX_ENTRIES:
        raise ValueError(f"found {len(entries)} entries, expected at most {MAX_ENTRIES}")
    return entries


class Fields(BaseModel):
    """A JSON object in which null means the default."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        check_number(data)
        if not isinstance(data, Mapping):
            return data
        return {name: value for name, value in data.items() if value is not None}
