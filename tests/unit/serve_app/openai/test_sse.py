"""Events on the wire, as clients split them."""

import json

from serve_app.openai.responses import Event
from serve_app.openai.sse import written


def test_an_event_is_one_line_of_data_whatever_its_text() -> None:
    text = "".join(map(chr, range(0x20, 0x2100))) + "\r\n\x00\x1c\ud800\N{GRINNING FACE}"
    lines = written(Event({"text": text}, id=b"7")).decode().splitlines()
    assert lines[0] == "id: 7"
    assert lines[2:] == [""]
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": text}
