"""The parameters of a text, as a program writes them."""

from collections.abc import Mapping, Set
from difflib import get_close_matches
from typing import Any, Self, cast

from pydantic import (
    ConfigDict,
    ModelWrapValidatorHandler,
    PositiveInt,
    ValidationError,
    model_validator,
)

from eesd_dist.errors import RequestError
from eesd_dist.parameters import NumAlternatives, SamplingFields
from eesd_dist.text.sampling_defaults import SamplingDefaults

_MEANINGLESS: Mapping[str, object] = {"detokenize": True, "spaces_between_special_tokens": True}
"""Parameters of vLLM that are not here, with the values that change nothing."""
_DEFAULT_TOKENS = 16


class SamplingParams(SamplingFields):
    """Parameters for the choice of a text's tokens and for its end, as in vLLM and the HTTP API.

    Raises RequestError for a parameter that is unknown or out of range."""

    model_config = ConfigDict(extra="forbid")
    null_is_a_value = frozenset({"max_tokens"})

    max_tokens: PositiveInt | None = _DEFAULT_TOKENS
    """Most tokens of the text; None: what the model's length leaves after the prompt."""
    logprobs: NumAlternatives | None = None
    """Number of alternatives reported for every token; None reports nothing."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_clear_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            data = {
                name: _json_form(value)
                for name, value in data.items()
                if name not in _MEANINGLESS or value != _MEANINGLESS[name]
            }
        try:
            return handler(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "sampling_params"
            raise RequestError(_problem(name, dict(first), cls), param=name) from error

    @classmethod
    def of_defaults(cls, defaults: SamplingDefaults) -> Self:
        """Returns parameters with the values of a checkpoint's `generation_config.json`."""
        stated = defaults.stated()
        return cls(max_tokens=cast("int", stated.pop("max_new_tokens", _DEFAULT_TOKENS)), **stated)  # type: ignore[arg-type]


def _json_form(value: object) -> object:
    """Python writes lists also as tuples and sets, and the keys of a mapping also as numbers."""
    if isinstance(value, tuple | Set):
        return list(value)
    if isinstance(value, Mapping):
        return {str(key) if isinstance(key, int) else key: entry for key, entry in value.items()}
    return value


def _problem(name: str, error: Mapping[str, Any], cls: type[SamplingFields]) -> str:
    if error["type"] == "extra_forbidden":
        close = get_close_matches(name, cls.model_fields, n=1)
        advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(cls.model_fields)}"
        return f"{name}: found a parameter that is not known here; {advice}"
    return f"{name}: found {error['input']!r:.80}: {error['msg']}"
