"""Response objects and events of `/v1/responses`, made of the answers of chats."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from serve_app.openai.answers import Event
from serve_app.openai.errors import http_error_of
from serve_app.openai.prepared import Prepared
from serve_app.openai.schema import ResponsesFields

Json = dict[str, Any]


def response_of(chat: Mapping[str, Any], prepared: Prepared, fields: ResponsesFields) -> Json:
    """Returns the response object of a whole chat."""
    choice = chat["choices"][0]
    text = choice["message"]["content"]
    whole = _ended(prepared, fields, text=text, finish_reason=choice["finish_reason"])
    warnings = {"warnings": chat["warnings"]} if "warnings" in chat else {}
    return whole | {"usage": _usage(chat["usage"]), "metrics": chat["metrics"], **warnings}


async def response_events(
    chunks: AsyncGenerator[Event, None], prepared: Prepared, fields: ResponsesFields
) -> AsyncGenerator[Event, None]:
    """Yields the events of a streamed chat with usage in the form of `/v1/responses`. An error
    after the first event is an event too."""
    number = 0
    async with aclosing(chunks):
        try:
            async for event in _payloads(chunks, prepared, fields):
                yield _numbered(event, number)
                number += 1
        except Exception as error:
            if number == 0:  # it gets a status of its own
                raise
            http_error = http_error_of(error)
            content = {"message": http_error.message, "code": http_error.code or http_error.type}
            yield _numbered({"type": "error", **content, "param": http_error.param}, number)


def _numbered(content: Json, number: int) -> Event:
    name: str = content["type"]
    return Event(content | {"sequence_number": number}, name=name.encode("ascii"))


async def _payloads(
    chunks: AsyncGenerator[Event, None], prepared: Prepared, fields: ResponsesFields
) -> AsyncGenerator[Json, None]:
    item_id, text, finish_reason = f"msg_{prepared.request_id}", "", None
    location: Json = {"item_id": item_id, "output_index": 0, "content_index": 0}
    is_first = True
    async for chunk in chunks:
        content: Mapping[str, Any] = chunk.content or {}
        if is_first:
            is_first = False
            response = _object(prepared, fields, status="in_progress", output=[])
            item = _item(item_id, status="in_progress", content=[])
            yield {"type": "response.created", "response": response}
            yield {"type": "response.in_progress", "response": response}
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **location, "part": _content_part("")}
        for choice in content.get("choices", ()):
            if delta := choice["delta"].get("content"):
                text += delta
                yield {
                    "type": "response.output_text.delta",
                    **location,
                    "delta": delta,
                    "logprobs": [],
                }
            finish_reason = choice["finish_reason"] or finish_reason
        if content.get("usage") is None:
            continue
        whole = _ended(prepared, fields, text=text, finish_reason=finish_reason)
        whole |= {"usage": _usage(content["usage"]), "metrics": content["metrics"]}
        (item,) = whole["output"]
        yield {"type": "response.output_text.done", **location, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **location, "part": _content_part(text)}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        yield {"type": f"response.{whole['status']}", "response": whole}


def _ended(
    prepared: Prepared, fields: ResponsesFields, *, text: str, finish_reason: str | None
) -> Json:
    status = "incomplete" if finish_reason == "length" else "completed"
    item = _item(f"msg_{prepared.request_id}", status=status, content=[_content_part(text)])
    whole = _object(prepared, fields, status=status, output=[item])
    if status == "incomplete":
        whole["incomplete_details"] = {"reason": "max_output_tokens"}
    return whole


def _object(
    prepared: Prepared, fields: ResponsesFields, *, status: str, output: list[Json]
) -> Json:
    sampling = prepared.choices[0].request.sampling
    return {
        "id": f"resp_{prepared.request_id}",
        "object": "response",
        "created_at": prepared.created_unix_s,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata,
        "model": prepared.model,
        "output": output,
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {
            "format": fields.text.format.model_dump(by_alias=True, exclude_unset=True)
            | {"type": fields.text.format.type}
        },
        "tool_choice": "none",
        "tools": [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _item(item_id: str, *, status: str, content: list[Json]) -> Json:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _content_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
