"""Parses server-sent events as a client does, and folds the chunks of a stream."""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

Json = dict[str, Any]

WITH_IDS = {"X-Eesd-Event-Ids": "true"}
"""Headers of a stream that can be resumed."""


class SentEvent(NamedTuple):
    id: str
    """Empty for an event without one."""
    data: str

    @property
    def chunk(self) -> Json:
        chunk: Json = json.loads(self.data)
        return chunk


def parsed(text: str) -> list[SentEvent]:
    """Returns the events of a whole answer, without comments."""
    events = []
    for block in text.split("\n\n"):
        # Not `splitlines`: it also splits at characters that texts have, such as U+0085.
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = [line.split(": ", 1) for line in lines]
        if not fields:
            continue
        assert [name for name, _ in fields] in (["data"], ["id", "data"]), block
        values = dict(map(tuple, fields))
        events.append(SentEvent(values.get("id", ""), values["data"]))
    return events


def folded(events: Iterable[SentEvent]) -> Json:
    """Returns what a client has in the end; asserts that the stream has one end and one head."""
    events = list(events)
    assert [event.data for event in events].count("[DONE]") == 1
    assert events[-1].data == "[DONE]"
    chunks = [event.chunk for event in events[:-1]]
    heads = [{k: v for k, v in c.items() if k not in _PER_CHUNK} for c in chunks]
    assert all(head == heads[0] for head in heads), heads
    choices: defaultdict[int, Json] = defaultdict(lambda: {"text": "", "ends": []})
    for chunk in chunks:
        for choice in chunk["choices"]:
            _add(choices[choice["index"]], choice)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usages) <= 1
    return {"head": heads[0], "choices": dict(choices), "usages": usages}


_PER_CHUNK = ("choices", "usage", "metrics")


def _add(whole: Json, choice: Json) -> None:
    delta = choice.get("delta", {})
    whole["text"] += choice.get("text") or delta.get("content") or ""
    if "role" in delta:
        whole.setdefault("roles", []).append(delta["role"])
    if choice["finish_reason"] is not None:
        whole["ends"].append((choice["finish_reason"], choice["stop_reason"]))
    if "prompt_token_ids" in choice:
        whole.setdefault("prompts", []).append(choice["prompt_token_ids"])
    whole.setdefault("token_ids", []).extend(choice.get("token_ids", []))
    for name, values in (choice["logprobs"] or {}).items():
        if isinstance(values, list):
            whole.setdefault(name, []).extend(values)
