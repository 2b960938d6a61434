"""All errors that this project raises on purpose, by their cause.

    EesdError
    +-- ConfigError          operator error: a file, a flag or a checkpoint that does not fit
    |   +-- CheckpointError
    +-- RequestError         caller error: this request can never be served as it is
    |   +-- PromptTooLong
    |   |   +-- TextTooLong  found before tokenising
    |   +-- ResumedElsewhere the client reads this stream on another connection
    +-- CapacityError        overload: try again later
    |   +-- QueueFull
    +-- EngineError          a failure of the service or its machines
        +-- PeerLost         a rank, actor or link does not answer; names the peer
        +-- EngineCrashed    the engine reported a crash with this request in it
        +-- LeaseLost        another supervisor has claimed a worker of this one
        +-- PoisonRequest    the request crashed the engine repeatedly: not tried again
        +-- Migrated         the stream continues in another pipeline: submit it again there
        +-- WireError        a message that is invalid in this epoch

A message says what was found, what was expected and what to do. The only table of HTTP codes for
these errors is in `serve_app.openai.errors`.
"""

from collections.abc import Sequence


class EesdError(Exception):
    """Base of all errors; never raised itself."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles without the constructor, since most constructors take no plain message."""
        return (_rebuilt, (type(self), self.args, self.__dict__.copy()))


def _rebuilt(
    kind: type[EesdError], args: tuple[object, ...], state: dict[str, object]
) -> EesdError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(EesdError):
    """The configuration is invalid."""


class CheckpointError(ConfigError):
    """A file of a checkpoint is invalid."""

    def __init__(self, *, file: object, found: str, expected: str, advice: str = "") -> None:
        text = f"{file}: found {found}, expected {expected}"
        super().__init__(f"{text}; {advice}" if advice else text)


class RequestError(EesdError):
    """The caller asked for something that cannot be served.

    `param` is the field of the request that caused it, by its name in the API.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    def __init__(self, *, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"prompt has {num_tokens} tokens, the model takes {limit} with at least one to "
            f"generate: cut {num_tokens - limit}",
            param="prompt",
        )


class TextTooLong(PromptTooLong):
    """The text has more bytes than any prompt of the model; it has not been tokenised."""

    def __init__(self, *, num_bytes: int, limit: int, max_tokens: int, param: str) -> None:
        RequestError.__init__(
            self,
            f"{param}: found a text of {num_bytes} bytes, expected at most {limit}: the model "
            f"takes {max_tokens} tokens, and its longest has {limit // max_tokens} bytes; cut "
            f"{num_bytes - limit} bytes or more",
            param=param,
        )


class ResumedElsewhere(RequestError):
    """The client has resumed the stream on another connection."""

    def __init__(self) -> None:
        super().__init__(
            "the stream was resumed on another connection and continues there: read it there, or "
            "resume it with the Last-Event-ID of the last event that was received"
        )


class CapacityError(EesdError):
    """No room now; the same request may be served later."""

    retry_after_s: float = 1.0
    """Seconds after which to try again; an ingress replaces it by an estimate."""


class QueueFull(CapacityError):
    def __init__(self, *, num_waiting: int, limit: int) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting already and the queue holds {limit}: "
            "try again in a moment, or raise scheduler.max_waiting"
        )


class EngineError(EesdError):
    """The service failed."""


PROCESS_DIED = "its process has died"
"""Reason of a lost peer when neither its node nor its link failed."""


class PeerLost(EngineError):
    """A peer did not answer in time, or its connection is closed.

    `peer` is its name: stage, rank and, once it has joined, node. `round_id` and `epoch` are
    None where there was none.
    """

    def __init__(
        self,
        *,
        peer: str,
        operation: str,
        reason: str,
        round_id: int | None = None,
        epoch: int | None = None,
    ) -> None:
        when = operation if epoch is None else f"{operation} (epoch {epoch})"
        super().__init__(f"lost {peer} during {when}: {reason}")
        self.peer = peer
        self.operation = operation
        self.reason = reason
        self.round_id = round_id
        self.epoch = epoch


class Migrated(EngineError):
    """The stream continues in another pipeline, from its tokens so far.

    `to` is the pipeline that expects it; None: any but `by`, and empty `by`: any.
    """

    def __init__(self, *, by: str, to: str | None, reason: str) -> None:
        super().__init__(f"{by} migrated its stream to {to or 'another pipeline'}: {reason}")
        self.by = by
        self.to = to
        self.reason = reason


class EngineCrashed(EngineError):
    """The engine, by the report of its own process, crashed while this request was in it."""

    def __init__(self, message: str, *, was_alone: bool) -> None:
        super().__init__(message)
        self.was_alone = was_alone


class LeaseLost(EngineError):
    """Another supervisor has claimed the worker: this one was taken for dead."""


class PoisonRequest(EngineError):
    """The engine crashed repeatedly with this request in it, the last time with no other."""

    def __init__(self, *, request_id: str, crashes: int, reason: str) -> None:
        super().__init__(
            f"request {request_id} is refused: the engine broke {crashes} times under it since its "
            f"last token, the last time with no other request in it ({reason}). Other requests go "
            "on; do not send this one again before the cause is known"
        )
        self.request_id = request_id
        self.crashes = crashes
        self.reason = reason


class WireError(EngineError):
    """A message is invalid in this version or epoch."""


_MAX_LISTED = 8


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    num_more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {num_more} more" if num_more > 0 else "")


def os_error_text(error: OSError) -> str:
    """Returns the file and what is wrong with it, in one line."""
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"
