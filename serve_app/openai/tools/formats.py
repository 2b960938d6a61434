"""The forms in which models write tool calls, and the grammar of an answer that is made of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from eesd_dist.text.grammars import json_rule, lark


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Form in which a family of models writes calls: objects with a name and arguments, between
    marks."""

    name: Literal["hermes", "llama3_json", "mistral"]
    marker: str
    """Precedes a call, or a list of them."""
    opening: str
    """Between the mark and an object."""
    between: str
    """Between two calls."""
    closing: str
    """Text after an object, or after the last one."""
    arguments: Literal["arguments", "parameters"]
    """The key of a call's arguments."""
    is_list: bool = False
    """True if one mark precedes all calls."""
    needs_marker: bool = True
    """Else an object that names a tool is a call too, if it begins the answer."""
    allows_parallel_calls: bool = True
    """True if its templates take answers with several calls back."""
    id_length: int = 24


HERMES = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    opening="\n",
    between="\n",
    closing="\n</tool_call>",
    arguments="arguments",
)
"""Hermes 2 and 3, Qwen 2.5 and 3."""
LLAMA3 = ToolFormat(
    name="llama3_json",
    marker="<|python_tag|>",
    opening="",
    between="; ",
    closing="",
    arguments="parameters",
    is_list=True,
    needs_marker=False,
    allows_parallel_calls=False,
)
"""Llama 3.1 to 3.3. It writes the mark before calls of its built-in tools only."""
MISTRAL = ToolFormat(
    name="mistral",
    marker="[TOOL_CALLS]",
    opening="[",
    between=", ",
    closing="]",
    arguments="arguments",
    is_list=True,
    id_length=9,
)
"""Mistral's models that write calls as a list; their templates ask for ids of nine characters."""

_SIGNS: Sequence[tuple[str, ToolFormat]] = (
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("[AVAILABLE_TOOLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
    ('"parameters"', LLAMA3),
)
"""Text that a template writes that has seen calls of a format, the surest first."""
_OTHERS = ("[ARGS]", "<function=")
"""Text of formats in which calls are no JSON objects: later Mistral models, Qwen3-Coder."""


def format_of(template: str | None) -> ToolFormat | None:
    """Returns the format of the calls that a chat template asks for; None: it knows no tools, or
    another format."""
    if template is None or "tools" not in template or any(sign in template for sign in _OTHERS):
        return None
    return next((form for sign, form in _SIGNS if sign in template), None)


def calls_grammar(
    form: ToolFormat,
    parameters: Mapping[str, Mapping[str, object]],
    *,
    parallel: bool,
    special_id: Callable[[str], int | None],
) -> str:
    """Returns the grammar of an answer that is one call, or several if `parallel`.

    Args:
        form: how the model writes calls.
        parameters: the JSON schema of the arguments of each tool that may be called.
        special_id: returns the id of a text that is one special token, which models write instead
            of the text; None for any other text.
    """
    token = special_id(form.marker)
    marker = json.dumps(form.marker) if token is None else f"<[{token}]>"
    opening = "" if not form.opening else f" {json.dumps(form.opening)}"
    closing = "" if not form.closing else f" {json.dumps(form.closing)}"
    if not form.needs_marker:
        marker = ""
    call, before, after = f"{marker}{opening} body{closing}", "", ""
    if form.is_list:
        # Some tokenizers write a blank after a mark.
        call, before, after = "body", f'{marker} " "?{opening} ' if marker else "", closing
    more = f" ({json.dumps(form.between)} call)*" if parallel else ""
    lines = [f"start: {before}call{more}{after}", f"call: {call}"]
    lines.append("body: " + " | ".join(f"tool_{at}" for at in range(len(parameters))))
    for at, (name, schema) in enumerate(parameters.items()):
        head = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
        lines.append(f'tool_{at}: {json.dumps(head)} args_{at} "}}"')
        lines.append(f"args_{at}: {json_rule(schema)}")
    return lark("\n".join(lines) + "\n")
