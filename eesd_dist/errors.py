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
        +-- PoisonRequest        a request that breaks every engine it is in: not tried again
        +-- Migrated            a stream that goes on in another pipeline: submit it again there
        +-- WireError        a message that does not say what this epoch expects

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


PROCESS_DIED = "its process has died"
"""Reason of a peer's loss that is not its node's or its link's."""


class PeerLost(EngineError):
    """A peer did not answer in time, or its connection is gone.

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
    """The stream ends here and is to go on elsewhere, from its tokens so far: no interruption.

    `to` names the pipeline that waits for it; None: any but `by`. Crashes are those it had there:
    see `types.Request`.
    """

    def __init__(
        self,
        *,
        by: str,
        to: str | None,
        reason: str,
        crashes: int = 0,
        attributable_crashes: int = 0,
    ) -> None:
        super().__init__(f"{by} hands its stream over to {to or 'another pipeline'}: {reason}")
        self.by = by
        self.to = to
        self.reason = reason
        self.crashes = crashes
        self.attributable_crashes = attributable_crashes


class PoisonRequest(EngineError):
    """The engine broke again and again with this request in it, the last time with no other."""

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
    """A message does not have the form this version and epoch expects."""


def os_error_text(error: OSError) -> str:
    """Which file, and what is wrong with it, in one line."""
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"
