"""Decides which tools a chat may, or must, call. Refuses what cannot be, naming the field."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars import normal_schema
from eesd_dist.types import TokenId
from serve_app.openai.schema import ChatFields, NamedTool
from serve_app.openai.tools.formats import ToolFormat, calls_grammar

_NAMED_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a chat, and how its model writes calls."""

    form: ToolFormat
    tools: tuple[Mapping[str, object], ...]
    """Tools as the client sent them, for the chat template."""
    names: tuple[str, ...]
    """Names of the tools that may be called."""
    max_calls: int | None
    grammar: str | None
    """Grammar of an answer that has to be made of calls."""
    notes: tuple[str, ...] = ()
    """Parts of its schemas that are not obeyed, for the client."""


def tool_use_of(
    fields: ChatFields,
    *,
    form: ToolFormat | None,
    special_id: Callable[[str], TokenId | None],
) -> ToolUse | None:
    """Returns how a chat may use tools; None: not at all.

    Args:
        form: of the model; None for one that cannot call tools.
        special_id: as for `calls_grammar`.
    """
    tools, choice = fields.usable_tools, fields.tool_choice
    if not tools:
        if fields.must_call:
            raise RequestError(
                "tool_choice asks for a call and there are no tools: send tools",
                param="tool_choice",
            )
        return None
    if form is None:
        raise RequestError(
            "this model's chat template has no tools, or none in the form of Llama 3, Mistral, "
            "Qwen or Hermes: leave tools out, or serve another model",
            param="tools",
        )
    parameters: dict[str, Mapping[str, object]] = {
        tool.function.name: tool.function.parameters for tool in tools
    }
    if len(parameters) < len(tools):
        raise RequestError("found two tools with one name: rename one", param="tools")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in parameters:
            raise RequestError(
                f"tool_choice names {ascii(name)[:_NAMED_CHARS]}, which is none of the tools",
                param="tool_choice",
            )
        parameters = {name: parameters[name]}
    parallel = fields.parallel_tool_calls and form.allows_parallel_calls
    parallel = parallel and not isinstance(choice, NamedTool)
    grammar, notes = None, []
    if fields.must_call:
        notes = [
            f"tools: {name}: {note}"
            for name, schema in parameters.items()
            for note in normal_schema(schema)[1]
        ]
        grammar = calls_grammar(form, parameters, parallel=parallel, special_id=special_id)
    return ToolUse(
        form=form,
        tools=tuple(tool.model_dump(exclude_unset=True) for tool in tools),
        names=tuple(parameters),
        max_calls=None if parallel else 1,
        grammar=grammar,
        notes=tuple(notes),
    )
