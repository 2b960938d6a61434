"""Work on texts and grammars outside the event loop, with bounded queues.

Texts are tokenised, and large answers written, in threads: the tokenizer's library releases the
GIL. Short texts stay on the loop: 4,096 characters take 2 ms, and do not wait for the long texts of
other requests.

Grammars that are new here are compiled a few at a time, fairly between callers: these take turns,
and each gets its share of the queue. The request of a client that leaves gives up its turn. A
grammar that was compiled before waits for nothing.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from eesd_dist.errors import CapacityError
from eesd_dist.parameters import ContentPart, Message
from serve_app.openai.schema import ChatFields, CompletionFields

T = TypeVar("T")

_INLINE_CHARS = 4096
_NUM_THREADS = 2
_MAX_QUEUED = 64
_NUM_AT_ONCE = 2
"""While one grammar is compiled here, the child process tries the next one."""
_MAX_WAITING = 64
_CHARS_PER_MESSAGE = 32
_CHARS_PER_WORD = 64
"""A call of the tokenizer takes as long as so many more characters."""


class TextThreads:
    """Runs work on texts."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="text")
        self._num_queued = 0

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """`size` is the number of characters or tokens. Raises CapacityError when too many long
        texts are waiting."""
        if size <= _INLINE_CHARS:
            return work()
        if self._num_queued == _MAX_QUEUED:
            raise CapacityError(f"{_MAX_QUEUED} long texts or grammars are waiting: try again")
        self._num_queued += 1
        try:
            return await self.finish(work)
        finally:
            self._num_queued -= 1

    async def finish(self, work: Callable[[], T]) -> T:
        """Runs what is never refused: an answer that was generated."""
        run = copy_context().run  # its log lines are about this request
        return await asyncio.get_running_loop().run_in_executor(self._pool, run, work)


class GrammarQueue:
    """Runs the work of compiling in threads; used from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="grammar")
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Callers with waiting requests, in the order of their turns."""
        self._num_waiting = 0
        self._num_running = 0

    async def run(self, work: Callable[[], None], *, caller: str) -> None:
        """Runs `work` when it is this caller's turn. Raises CapacityError if too many grammars of
        this caller wait."""
        await self._turn(caller)
        run = copy_context().run  # its log lines are about this request
        compiling = asyncio.get_running_loop().run_in_executor(self._pool, run, work)
        compiling.add_done_callback(self._ended)  # also if the client leaves before that
        await asyncio.shield(compiling)

    async def _turn(self, caller: str) -> None:
        if self._num_running < _NUM_AT_ONCE:
            self._num_running += 1
            return
        self._require_room(caller)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(caller, turn)
            else:  # its turn came at the same moment
                self._pass_on()
            raise

    def _require_room(self, caller: str) -> None:
        """Raises CapacityError if the queue is full and this caller has its share of it; the queue
        may reach twice its size, since a caller gets its share of a full queue too."""
        num_callers = len(self._waiting.keys() | {caller})
        num_own = len(self._waiting.get(caller, ()))
        share = max(1, _MAX_WAITING // num_callers)
        is_full = self._num_waiting >= _MAX_WAITING
        if (is_full and num_own >= share) or self._num_waiting >= 2 * _MAX_WAITING:
            raise CapacityError(
                f"{num_own} new grammars of this caller wait to be compiled, of "
                f"{self._num_waiting} in all: try again, or use grammars that were compiled before"
            )

    def _leave(self, caller: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting[caller]
        turns.remove(turn)
        self._num_waiting -= 1
        if not turns:
            del self._waiting[caller]

    def _ended(self, compiling: "asyncio.Future[None]") -> None:
        if not compiling.cancelled():
            compiling.exception()  # it is raised in `run`, where the client has not left
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives a free place to the next caller."""
        if not self._waiting:
            self._num_running -= 1
            return
        caller, turns = self._waiting.popitem(last=False)
        turn = turns.popleft()
        self._num_waiting -= 1
        if turns:
            self._waiting[caller] = turns
        turn.set_result(None)


def size_of(fields: CompletionFields | ChatFields) -> int:
    """Returns about how many characters the tokenizer gets."""
    size = sum(_CHARS_PER_WORD + len(word) for word in fields.bad_words)
    size += len(fields.allowed_token_ids or ())
    if isinstance(fields, ChatFields):
        size += _size_of_json([tool.model_dump() for tool in fields.tools])
        return size + size_of_chat(fields.messages, fields.chat_template_kwargs)
    return size + sum(len(prompt) for prompt in fields.prompts)


def size_of_chat(messages: Sequence[Message], options: Mapping[str, object]) -> int:
    """Returns about how many characters a template makes of messages and options, which include
    fields that only some templates read."""
    return _size_of_json(options) + sum(
        _CHARS_PER_MESSAGE + _size_of_json(message.model_extra) + _size_of_content(message.content)
        for message in messages
    )


def _size_of_content(content: str | Sequence[ContentPart]) -> int:
    return (
        len(content) if isinstance(content, str) else sum(len(segment.text) for segment in content)
    )


def _size_of_json(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _size_of_json(inner) for key, inner in value.items())
    return sum(map(_size_of_json, value)) if isinstance(value, list) else 1
