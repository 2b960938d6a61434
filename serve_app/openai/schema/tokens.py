"""Bodies of the endpoints that convert between texts and tokens."""

from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, model_validator

from eesd_dist.parameters import Fields, Messages


class TokenizeFields(Fields):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    """Name of the served model; may be left out."""
    prompt: str | None = None
    """A text."""
    messages: Messages | None = None
    """A conversation, by the model's chat template."""
    add_special_tokens: bool = True
    """Puts the tokenizer's beginning token before a text."""
    add_generation_prompt: bool = True
    """Lets the template open an answer."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeFields(Fields):
    """Body of `POST /detokenize`."""

    model: str | None = None
    """Name of the served model; may be left out."""
    tokens: Annotated[list[NonNegativeInt], Field(fail_fast=True)]
    """Token ids."""
