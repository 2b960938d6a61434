"""Which tokens may follow one text that has to match a grammar, and each draft after it.

A function of the tokens alone: the mask of a row is the same with speculation on and off. One
thread at a time.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from llguidance import LLExecutor, LLMatcher

_WORD_BITS = 32
_BEGINS_AGAIN_AFTER = 256
_NICE = 15
_MOST_TRIES = 8


class TokenMatcher:
    """Reads a text token by token, and allows what may come next.

    A mask has one bit for each token of the vocabulary, the lowest bit of the first byte for token
    0. Where the text may end it allows the end tokens.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        vocab_size: int,
        recompile: Callable[[], LLMatcher] | None,
        reader: "BackgroundReader | None" = None,
    ) -> None:
        """`recompile`: copies of one compiled grammar share the states that matching has made,
        and with them their limit; where it is reached, this text gets states of its own, and new
        ones each time it has grown by some hundred tokens. None: it fails there. `reader`: for
        `mask_in_thread`."""
        self._matcher = matcher
        self._recompile = recompile
        self._reader = reader
        self._begins_again_at = 0
        """Length of the text from which it may get new states."""
        self._read: list[int] = []
        self._library_s = 0.0
        self._words = (ctypes.c_uint32 * -(-vocab_size // _WORD_BITS))()
        self._everything = b"\xff" * ctypes.sizeof(self._words)

    @property
    def failure(self) -> str | None:
        """Reason why no more tokens can be matched: the text needs more work than the limits of
        `compiler` allow. All tokens are allowed then."""
        error = self._matcher.get_error().partition("\n")[0]
        return f"the grammar needs more work than is allowed: {error}" if error else None

    @property
    def num_read(self) -> int:
        return len(self._read)

    def read(self, tokens: Sequence[int], *, may_recompile: bool = True) -> None:
        """Reads the tokens of the text that it has not read yet. What it has read stays.
        `may_recompile`: compiles the grammar again where needed, which takes up to a second."""
        fresh = list(tokens[len(self._read) :])
        if fresh:
            self._read += fresh
            if not self._matcher.consume_tokens(fresh) and may_recompile:
                self._begin_again()

    def mask_after(self, draft: Sequence[int] = (), *, may_recompile: bool = True) -> bytes:
        """Returns the tokens that may follow the text and this draft; all where a token of the
        draft is not allowed itself, so that none after it is chosen. `may_recompile`: as of
        `read`."""
        mask = self._mask_after(draft)
        if self._matcher.is_error() and may_recompile and self._begin_again():
            mask = self._mask_after(draft)
        return self._everything if self._matcher.is_error() else mask

    def mask_in_thread(self, tokens: Sequence[int]) -> tuple[bytes, float]:
        """Reads the text and returns the tokens that may follow it, as `read` and `mask_after` do,
        in a thread: others go on while the library works. Returns the seconds of a processor that
        the library has used, too, of which this thread's own clock knows nothing."""
        self._library_s = 0.0
        fresh = list(tokens[len(self._read) :])
        self._read += fresh
        if not all(map(self._consume_in_thread, fresh)):
            self._begin_again(in_thread=True)
        mask = self._mask_in_thread()
        if self._matcher.is_error() and self._begin_again(in_thread=True):
            mask = self._mask_in_thread()
        return self._everything if self._matcher.is_error() else mask, self._library_s

    def _consume_in_thread(self, token: int) -> bool:
        assert self._reader is not None
        is_accepted, seconds = self._reader.consume(self._matcher, token)
        self._library_s += seconds
        return is_accepted

    def _mask_in_thread(self) -> bytes:
        assert self._reader is not None
        if self._matcher.is_error():
            return self._everything
        mask, seconds = self._reader.mask(self._matcher)
        self._library_s += seconds
        return mask

    def _mask_after(self, draft: Sequence[int]) -> bytes:
        count = self._matcher.try_consume_tokens(list(draft)) if draft else 0
        mask = self._everything
        if count == len(draft):
            size = ctypes.sizeof(self._words)
            self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(self._words), size)
            mask = bytes(self._words)
        if count and not self._matcher.is_error():
            self._matcher.rollback(count)
        return mask

    def _begin_again(self, *, in_thread: bool = False) -> bool:
        """Reads the text with states of its own."""
        if self._recompile is None or len(self._read) < self._begins_again_at:
            return False
        self._matcher = self._recompile()
        self._begins_again_at = len(self._read) + _BEGINS_AGAIN_AFTER
        if in_thread:
            return all(map(self._consume_in_thread, self._read))
        return not self._read or bool(self._matcher.consume_tokens(self._read))


class BackgroundReader:
    """Works for one matcher while other threads run, and behind them where processors are few.

    The library holds the interpreter's lock while one matcher reads, however long this takes, and
    drops it where several read at once: so a second one, which has ended, works next to each. The
    work is done by threads of the library, which have a low priority and never hold that lock long.
    What it takes is counted by the clocks of these threads: how long they wait for a processor is
    no matter of the grammar.
    """

    def __init__(self, ended: LLMatcher, *, num_words: int) -> None:
        self._ended = ended
        self._num_words = num_words
        self._of_thread = threading.local()

    def consume(self, matcher: LLMatcher, token: int) -> tuple[bool, float]:
        """Reads one token; returns whether the text may have it, and the seconds used."""
        state = self._thread_state()
        started = state.clock()
        accepted = state.executor.consume_token_par([(matcher, token), (state.ended, token)])
        return bool(accepted[0]), state.clock() - started

    def mask(self, matcher: LLMatcher) -> tuple[bytes, float]:
        """Returns the tokens that may follow, and the seconds used."""
        state = self._thread_state()
        size = ctypes.sizeof(state.words) // 2
        pair = [(matcher, 0), (state.open, 1)]
        started = state.clock()
        state.executor.unsafe_compute_mask_ptr(pair, ctypes.addressof(state.words), size, 2)
        return bytes(state.words)[:size], state.clock() - started

    def _thread_state(self) -> threading.local:
        state = self._of_thread
        if not hasattr(state, "executor"):
            state.ended, state.open = self._ended.deep_copy(), self._ended.deep_copy()
            state.open.reset()
            state.words = (ctypes.c_uint32 * (2 * self._num_words))()
            state.executor, state.clock = _executor()
        return state


_MAKING = threading.Lock()


def _executor() -> tuple[LLExecutor, Callable[[], float]]:
    """Returns an executor the thread of which has a low priority, which it inherits, and that
    thread's clock."""
    executors: list[tuple[LLExecutor, Callable[[], float]]] = []

    def make() -> None:
        if sys.platform != "linux":  # where a priority is that of the whole process
            executors.append((LLExecutor(num_threads=1), time.perf_counter))
            return
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        clock: Callable[[], float] = time.perf_counter
        for _ in range(_MOST_TRIES):
            before = _low_threads()
            executor = LLExecutor(num_threads=1)
            new = _low_threads() - before
            if len(new) == 1:
                clock = partial(time.clock_gettime, _clock_id(new.pop()))
                break  # else another thread has begun, in a process of the same priority
        executors.append((executor, clock))

    with _MAKING:
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    return executors[0]


def _low_threads() -> set[int]:
    """Returns this process's threads of low priority, by their ids in the kernel."""
    low = set()
    for name in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            if os.getpriority(os.PRIO_PROCESS, int(name)) == _NICE:
                low.add(int(name))
    return low


def _clock_id(thread_id: int) -> int:
    """Returns Linux's id of the clock that counts the processor time of a thread: `CPUCLOCK_SCHED`
    with `CPUCLOCK_PERTHREAD_MASK` (include/linux/posix-timers.h)."""
    return ~thread_id << 3 | 6
