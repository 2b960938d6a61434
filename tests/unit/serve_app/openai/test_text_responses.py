"""`/v1/responses`: what a chat answers, in the form that OpenAI's client reads."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseIncompleteEvent

from eesd_dist.errors import CapacityError
from tests.unit.serve_app.openai.conftest import Api

PATH = "/v1/responses"


def test_a_text_is_that_of_the_chat(api: Api) -> None:
    chat = api.client.chat.completions.create(
        model="toy",
        messages=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hi"},
        ],
        max_tokens=9,
        seed=3,
    )
    response = api.client.responses.create(
        model="toy",
        instructions="be kind",
        input="hi",
        max_output_tokens=9,
        metadata={"a": "b"},
        extra_body={"seed": 3},
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens == 9
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.id.startswith("resp_")


def test_messages_may_have_parts_and_answers_of_before(api: Api) -> None:
    api.says("fine")
    api.engine.requests.clear()
    response = api.client.responses.create(
        model="toy",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "how are you"}]},
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "well", "annotations": []}],
            },
            {"role": "user", "content": "really"},
        ],
    )
    assert response.status == "completed"
    assert response.output_text == "fine"
    prompt = api.tokenizer.decode(api.engine.requests[0].prompt, skip_special_tokens=False)
    assert prompt.endswith(
        "<|user|>how are you<|end|><|assistant|>well<|end|><|user|>really<|end|><|assistant|>"
    )


def test_unknown_fields_are_named(api: Api) -> None:
    body = {"input": "hi", "max_output_tokens": 2, "store": True, "reasoning": {"effort": "low"}}
    assert "warnings" not in api.post(PATH, body).json()
    (warning,) = api.post(PATH, body | {"inptu": 3}).json()["warnings"]
    assert "inptu" in warning


def test_a_stream_has_all_events_in_order(api: Api) -> None:
    whole = api.post(PATH, {"input": "hi", "max_output_tokens": 9, "seed": 1}).json()
    with api.client.responses.stream(
        model="toy", input="hi", max_output_tokens=9, extra_body={"seed": 1}
    ) as stream:
        events = list(stream)
    last = events[-1]
    assert isinstance(last, ResponseIncompleteEvent)
    final = last.response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole["output"][0]["content"][0]["text"]
    assert final.usage is not None
    assert final.usage.output_tokens == 9


def test_every_event_has_its_name_and_none_follows_the_last(api: Api) -> None:
    body = {"input": "hi", "max_output_tokens": 3, "stream": True}
    blocks = [block for block in api.post(PATH, body).text.split("\n\n") if block]
    names = []
    for block in blocks:
        name, data = block.split("\n")
        names.append(name.removeprefix("event: "))
        assert json.loads(data.removeprefix("data: "))["type"] == names[-1]
    assert names[-1] == "response.incomplete"


def test_a_format_is_a_grammar(api: Api) -> None:
    api.engine.requests.clear()
    body = {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "null"}}}}
    assert api.post(PATH, body).status_code == 200
    assert api.engine.requests[0].sampling.grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 10**6}, "max_tokens"),
        ({"model": "other"}, None),
        ({"lora_request": {"name": "x"}}, "lora_request"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    fields: dict[str, Any], param: str | None, api: Api
) -> None:
    answer = api.post(PATH, {"input": "hi", "max_output_tokens": 4} | fields)
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    error_param = answer.json()["error"]["param"]
    assert param is None or error_param.startswith(param)


def test_an_error_in_a_stream_is_an_event(api: Api) -> None:
    api.engine.breaks_after = 2
    with api.client.responses.stream(model="toy", input="hi", max_output_tokens=9) as stream:
        events = list(stream)
    last = events[-1]
    assert isinstance(last, ResponseErrorEvent)
    assert last.code == "internal_error"
    assert last.sequence_number == len(events) - 1


def test_an_error_before_the_first_token_has_a_status(api: Api) -> None:
    api.engine.refusal = CapacityError("full")
    with pytest.raises(openai.RateLimitError):
        api.client.responses.create(model="toy", input="hi", stream=True)


def test_a_stream_cannot_be_resumed_and_says_so(api: Api) -> None:
    headers = {"Last-Event-ID": "x"}
    answer = api.http.post(PATH, json={"input": "x", "stream": True}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"
