"""Clients that keep a number of streams up, and compare every text with the right one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from eesd_dist.errors import EngineError
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId

if TYPE_CHECKING:
    from serve_app.ingress.pipeline_client import ServiceClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request of the load, and the text that plain decoding makes of it."""

    tokens: tuple[TokenId, ...]
    sampling: SamplingParams
    text: tuple[TokenId, ...]


@dataclass(slots=True, kw_only=True)
class Texts:
    """How the streams ended."""

    num_whole: int = 0
    changed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    num_migrated: int = 0
    """Times that a stream continued in another pipeline."""
    longest_first_token_s: float = 0.0


class Clients:
    """Each client starts its next request when the one before has ended.

    Any error breaks a stream, whatever its class.
    """

    def __init__(self, client: "ServiceClient", prompts: Sequence[Prompt]) -> None:
        self._client = client
        self._prompts = prompts
        self._numbers = count()
        self._wanted = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.texts = Texts()

    @property
    def num_live(self) -> int:
        return len(self._tasks)

    def keep(self, number: int) -> None:
        """Changes the number of streams; those beyond it end with their texts, and broken ones are
        replaced."""
        self._wanted = number
        while len(self._tasks) < number:
            self._start()

    async def end(self, *, timeout_s: float) -> None:
        """Waits for the last texts. Raises EngineError for streams open after `timeout_s`."""
        self._wanted = 0
        if not self._tasks:
            return
        _, still_open = await asyncio.wait(set(self._tasks), timeout=timeout_s)
        if still_open:
            raise EngineError(
                f"{len(still_open)} streams still open {timeout_s:g} s after the load has ended, "
                "expected none"
            )

    def _start(self) -> None:
        number = next(self._numbers)
        prompt = self._prompts[number % len(self._prompts)]
        request = Request(
            request_id=RequestId(f"load-{number}"), prompt=prompt.tokens, sampling=prompt.sampling
        )
        task = asyncio.create_task(self._run(request, prompt.text), name=request.request_id)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            # Replaced by the next keep(): a client that fails at once would start without end.
            self.texts.broken.append(f"{task.get_name()}: {error!r}")
        elif len(self._tasks) < self._wanted:
            self._start()

    async def _run(self, request: Request, text: tuple[TokenId, ...]) -> None:
        loop = asyncio.get_running_loop()
        began_s, got = loop.time(), list[Any]()
        async for emissions in self._client.stream(request):
            if not got:
                waited_s = loop.time() - began_s
                self.texts.longest_first_token_s = max(self.texts.longest_first_token_s, waited_s)
            got += [token for emission in emissions for token in emission.tokens]
        if tuple(got) == text:
            self.texts.num_whole += 1
        else:
            self.texts.changed.append(str(request.request_id))
