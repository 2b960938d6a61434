"""Undeclared fields: those refused because ignoring them would change the answer, those that change
nothing here, and the others, of which the client is told."""

from collections.abc import Mapping
from typing import NamedTuple

from serve_app.openai.schema.bodies import ChatFields, GenerationFields


class _Harmless(NamedTuple):
    """The values of a refused field that change nothing, and pass."""

    values: tuple[object, ...] = ()
    or_empty: bool = False
    """Also false, 0, and empty texts, lists and objects."""

    def has(self, value: object) -> bool:
        return (self.or_empty and not value) or any(
            value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
            for harmless in self.values
        )


_NEVER, _EMPTY = _Harmless(), _Harmless(or_empty=True)

REFUSED: Mapping[str, _Harmless] = {
    "audio": _NEVER,
    "chat_template": _NEVER,
    "detokenize": _Harmless((True,)),
    "documents": _EMPTY,
    "dry_multiplier": _EMPTY,
    "function_call": _Harmless(("none",)),
    "functions": _EMPTY,
    "length_penalty": _Harmless((1.0,)),
    "logits_processors": _EMPTY,
    "lora_request": _EMPTY,
    "mirostat": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "modalities": _Harmless((["text"],)),
    "prompt_embeds": _NEVER,
    "return_tokens_as_token_ids": _EMPTY,
    "spaces_between_special_tokens": _Harmless((True,)),
    "suffix": _EMPTY,
    "thinking_token_budget": _NEVER,
    "truncate_prompt_tokens": _NEVER,
    "typical_p": _Harmless((1.0,)),
    "use_beam_search": _EMPTY,
    "vllm_xargs": _EMPTY,
    "web_search_options": _NEVER,
}
"""Refused, except for values that change nothing."""

REFUSED_SOMETIMES: Mapping[str, str] = {
    "best_of": "unless it is 1 or `n`",
    "echo": "if true in a chat",
    "tool_choice": "in a completion, unless it is `none` or `auto`",
    "tools": "in a completion, if there are any, unless `tool_choice` is `none`",
}

IGNORED = frozenset(
    {
        "guided_decoding_backend",
        "include_reasoning",
        "kv_transfer_params",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "reasoning",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""They change nothing here."""


def unsupported(fields: GenerationFields) -> str | None:
    """Returns the first field that would change the answer and is not supported; None: none."""
    unknown = fields.unknown
    for name, value in unknown.items():
        harmless = REFUSED.get(name)
        if harmless is not None and not harmless.has(value):
            return name
    if unknown.get("tools") and unknown.get("tool_choice") != "none":
        return "tools"
    if unknown.get("tool_choice", "none") not in ("none", "auto"):
        return "tool_choice"
    if unknown.get("best_of", fields.n) not in (1, fields.n):
        return "best_of"
    if isinstance(fields, ChatFields) and unknown.get("echo", False) is not False:
        return "echo"
    return None


def ignored(fields: GenerationFields) -> list[str]:
    """Returns fields that are not known, of which the client is told."""
    return sorted(fields.unknown.keys() - REFUSED.keys() - REFUSED_SOMETIMES.keys() - IGNORED)
