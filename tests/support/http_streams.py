"""Reads completions from a running service, so that a test can inject faults."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping

import httpx

from eesd_dist.bench.load_client import Listener, Streamed, stream

_SILENCE_S = 150.0
_NUM_BEFORE = 20
"""Tokens that are read before a fault."""
_BODY = {
    "prompt": "the log",
    "seed": 6,
    "temperature": 0.9,
    "max_tokens": 600,
    "stream": True,
    "return_token_ids": True,
    "ignore_eos": True,
    "stream_options": {"flush_interval_s": 0},
}


def streamed(url: str, *, meanwhile: Callable[[], object] = lambda: None) -> Streamed:
    """Reads a stream as a client that goes on when its connection breaks; `meanwhile` is called
    after the first tokens."""

    async def read() -> Streamed:
        listener = Listener("stream")
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            reading = asyncio.ensure_future(stream(client, listener, _BODY, max_attempts=200))
            while len(listener.heard().tokens) < _NUM_BEFORE and not reading.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            meanwhile()
            await reading
        return listener.heard()

    result = asyncio.run(read())
    assert result.is_complete, result.error
    return result


class HttpStream:
    """One streamed completion, read by a thread until its last token or an error."""

    def __init__(self, url: str, body: Mapping[str, object]) -> None:
        self.tokens: list[int] = []
        self.longest_pause_s = 0.0
        self._url = url
        self._body = {**body, "stream": True, "return_token_ids": True, "ignore_eos": True}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, num_tokens: int, *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.tokens) < num_tokens:
            self._raise()
            assert time.monotonic() < deadline, f"{len(self.tokens)} tokens in {timeout_s:g} s"
            time.sleep(0.02)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self, *, timeout_s: float = _SILENCE_S) -> list[int]:
        """Returns all tokens; raises the error that ended the stream early."""
        self._thread.join(timeout_s)
        self._raise()
        assert self.is_over, f"no end within {timeout_s:g} s, {len(self.tokens)} tokens so far"
        assert len(self.tokens) == self._body["max_tokens"]
        return self.tokens

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            url = f"{self._url}/v1/completions"
            with httpx.stream("POST", url, json=self._body, timeout=_SILENCE_S) as answer:
                if answer.status_code != 200:
                    raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
                self._take(answer)
        except BaseException as error:  # raised again in the thread of the test
            self._error = error

    def _take(self, answer: httpx.Response) -> None:
        last_s = time.monotonic()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise AssertionError(f"after {len(self.tokens)} tokens: {event['error']}")
            for choice in event["choices"]:
                self.tokens += choice.get("token_ids", [])
            time_s = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, time_s - last_s)
            last_s = time_s
