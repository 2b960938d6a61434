"""Events on the wire, as clients split them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from eesd_dist.types import TokenId, TokenLogprobs
from serve_app.openai.answers import Event
from serve_app.openai.logprobs import LazyList, LogprobFormat, TokenEntry
from serve_app.openai.sse import encoded, encoded_in_parts, written
from tests.support.toy_codec import ByteCodec

_Json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(st.text(), inner),
)


def test_an_event_is_one_line_of_data_whatever_its_text() -> None:
    text = "".join(map(chr, range(0x20, 0x2100))) + "\r\n\x00\x1c\ud800\N{GRINNING FACE}"
    lines = written(Event({"text": text}, id=b"7")).decode().splitlines()
    assert lines[0] == "id: 7"
    assert lines[2:] == [""]
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": text}


@given(st.dictionaries(st.text(), _Json))
def test_json_in_parts_is_the_same(content: dict[str, object]) -> None:
    assert encoded_in_parts(content) == encoded(content)


def test_a_large_answer_in_parts_is_the_same() -> None:
    entry = {"token": "a\u2028b", "logprob": -0.25, "bytes": [97]}
    entries = [entry | {"top_logprobs": [entry] * 20} for _ in range(200)]
    choice = {"index": 0, "logprobs": {"content": entries, "refusal": None}, "token_ids": [1] * 200}
    answer = {"id": "x", "choices": [choice] * 130, "usage": {}}
    assert encoded_in_parts(answer) == encoded(answer)


def test_a_list_that_is_made_as_it_is_written_is_the_same_in_both_ways() -> None:
    logprobs = TokenLogprobs(logprob=-0.5, top=((TokenId(1), -0.5), (TokenId(2), -1.5)))
    entries = [TokenEntry(TokenId(at % 7), logprobs, at) for at in range(200)]
    shape = LogprobFormat(ByteCodec(), num_top=2)
    for listed in (shape.of_chat(entries), shape.of_text(entries)):
        answer = {"choices": [{"logprobs": listed}]}
        plain = {"choices": [{"logprobs": {key: _plain(column) for key, column in listed.items()}}]}
        assert any(isinstance(column, LazyList) for column in listed.values())
        assert encoded_in_parts(answer) == encoded(answer) == encoded(plain)


def _plain(value: object) -> object:
    return [value[at] for at in range(len(value))] if isinstance(value, LazyList) else value
