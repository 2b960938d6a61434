"""Every error this project raises on purpose, by whose fault it is.

    EesdError
    +-- ConfigError          the operator: a file, a flag, a checkpoint that does not fit
    |   +-- CheckpointError
    +-- RequestError         the caller: this request can never be served as it is
    |   +-- PromptTooLong
    +-- CapacityError        nobody: try again later
    |   +-- QueueFull
    +-- EngineError          us, or the machines under us
        +-- PeerLost         a rank, actor or link that stopped answering; names the peer
        +-- WireError        a message that does not say what this generation expects

A message says what was found, what was expected and what to do. HTTP codes are given to these in
one table, in `serve_app.openai.errors`, and nowhere else.
"""


class EesdError(Exception):
    """Root of the tree; never raised itself."""

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes, and most constructors take no plain message."""
        return (_rebuilt, (type(self), self.args, self.__dict__.copy()))


def _rebuilt(
    kind: type[EesdError], args: tuple[object, ...], state: dict[str, object]
) -> EesdError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ConfigError(EesdError):
    """What the operator wrote does not fit together."""


class CheckpointError(ConfigError):
    """A checkpoint folder is not what it has to be."""

    def __init__(self, *, file: object, found: str, expected: str, advice: str = "") -> None:
        text = f"{file}: found {found}, expected {expected}"
        super().__init__(f"{text}; {advice}" if advice else text)


class RequestError(EesdError):
    """The caller asked for something that cannot be served.

    `param` is the field of the request that is to blame, in the caller's own words.
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


class CapacityError(EesdError):
    """No room now; the same request may be served later."""

    retry_after_s: float = 1.0


class QueueFull(CapacityError):
    def __init__(self, *, num_waiting: int, limit: int) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting already and the queue holds {limit}: "
            "try again in a moment, or raise scheduler.max_waiting"
        )


class EngineError(EesdError):
    """Something on our side broke."""


class PeerLost(EngineError):
    """A peer did not answer in time, or its connection is gone."""

    def __init__(self, *, peer: str, operation: str, reason: str) -> None:
        super().__init__(f"lost {peer} during {operation}: {reason}")
        self.peer = peer
        self.operation = operation
        self.reason = reason


class WireError(EngineError):
    """A message does not have the form this version and generation expects."""


def os_error_text(error: OSError) -> str:
    """Which file, and what is wrong with it, in one line."""
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"
