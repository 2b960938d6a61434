"""Tokenizers with chat templates that know tools, as those of Hermes, Llama 3 and Mistral do."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from eesd_dist.text import Tokenizer
from serve_app.openai.tools import ToolFormat
from serve_app.openai.tools.formats import HERMES, LLAMA3, MISTRAL
from tests.support.tiny_tokenizer import write_byte_level

FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
SPECIAL: Mapping[str, Sequence[str]] = {
    "hermes": (),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
}
"""Marks that are one special token; that of Hermes is text."""
_TURNS = (
    "{% for m in messages %}<|{{ m['role'] if m['role'] != 'tool' else 'user' }}|>"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}CALLS{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES: Mapping[str, str] = {
    "hermes": (
        "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|end|>{% endif %}'
        + _TURNS.replace(
            "CALLS",
            '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
            "{{ c.function.arguments | tojson }}}\n</tool_call>",
        )
    ),
    "llama3_json": (
        "{% if tools is not none and tools %}<|system|>Respond in the format "
        '{"name": function name, "parameters": dictionary of arguments}.'
        "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}<|end|>{% endif %}"
        "{% if builtin_tools is defined %}<|python_tag|>{% endif %}"
        + _TURNS.replace(
            "CALLS",
            '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
        )
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        + _TURNS.replace(
            "CALLS",
            '[TOOL_CALLS][{"name": "{{ c.function.name }}", "arguments": '
            '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}]',
        )
    ),
}


def tool_tokenizer(folder: Path, name: str, *, max_tokens: int | None = None) -> Tokenizer:
    write_byte_level(folder, chat_template=TEMPLATES[name], more_special_tokens=SPECIAL[name])
    return Tokenizer.load(folder, max_tokens=max_tokens)
