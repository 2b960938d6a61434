"""Fields of chats about tools."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eesd_dist.parameters import Fields

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_MAX_TOOLS = 128


class Function(Fields):
    """`tools[].function`."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    """A JSON schema of the arguments."""


class Tool(Fields):
    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """`{"type": "function", "function": {"name": ...}}`."""

    type: Literal["function"]
    function: FunctionName


class ToolFields(BaseModel):
    """The fields of a chat that say which tools may, or must, be called."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS, fail_fast=True)] = []
    """Functions that the answer may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """`none`: no calls; `auto`: the model decides; `required`, or one tool: the answer is made of
    calls with arguments that match their schemas."""
    parallel_tool_calls: bool = True
    """Allows several calls in the answer."""

    @property
    def usable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """True if the answer is made of calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
