"""Log lines: as text, or as one JSON object each; with the id of the request that they are about.

Messages have the form `event: key=%s key=%d`; in JSON the event and each key are fields, with the
values that were given and not their text.
"""

import fcntl
import json
import logging
import math
import os
import re
import shutil
import stat
import sys
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

current_request: ContextVar[str] = ContextVar("current_request", default="")
"""Id of the request that this task serves; empty outside of requests."""

_MAX_BYTES = 8 * 2**20
_PLACEHOLDER = re.compile(r"%[-\d.]*[a-z]")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that would end a line, or move a terminal's cursor."""


class TextLines(logging.Formatter):
    """Writes one line for each message, whatever is in its values, and adds the request to lines
    that do not name it. The traceback of an exception follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        line = _CONTROL.sub(_escaped, super().formatMessage(record))
        request = current_request.get()
        return f"{line} request={request}" if request and " request=" not in line else line


class JsonLines(logging.Formatter):
    """Writes `time` (UTC), `level`, `logger`, `pid`, `event`, `message`, `request` where there is
    one, `error` with the traceback of an exception, and the keys of the message."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line: dict[str, object] = _fields_of(record) | {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": os.getpid(),
            "event": str(record.msg).partition(":")[0] if record.args else message,
            "message": message,
        }
        if request := current_request.get():
            line.setdefault("request", request)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class BoundedStream(logging.StreamHandler[TextIO]):
    """Writes to a stream. Where that is a file of its own, as Ray makes one of each process's
    stderr, the file begins again at a size; what it had until then is kept as FILE.1.

    The file stays the same one: native code, which reports its crashes there, and children write
    to it too.
    """

    def __init__(self, stream: TextIO, *, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(stream)
        self._max_bytes = max_bytes

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            handle = self.stream.fileno()
            status = os.fstat(handle)
            if stat.S_ISREG(status.st_mode) and status.st_size > self._max_bytes:
                _begin_again(handle)
        except (OSError, ValueError):  # no handle, or closed; the line itself was written
            return


def _begin_again(handle: int) -> None:
    """Empties a file; a copy that a full disk does not take is left out."""
    # Another position than the end would leave a hole of the old size.
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_APPEND)
    file = Path(os.readlink(f"/proc/self/fd/{handle}"))
    with suppress(OSError):
        shutil.copyfile(file, file.with_name(f"{file.name}.1"))
    os.ftruncate(handle, 0)


def set_up_logs(form: LogFormat) -> None:
    """Sends the log lines of this process to stderr, unless that was set up before."""
    handler = BoundedStream(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Returns the keys of the message with the values given for them."""
    template, args = str(record.msg), record.args
    if not isinstance(args, tuple) or len(_PLACEHOLDER.findall(template)) != len(args):
        return {}
    values = iter(args)
    fields: dict[str, object] = {}
    for match in re.finditer(rf"(?:(\w+)=)?{_PLACEHOLDER.pattern}", template):
        value = next(values)
        if match[1]:
            is_number = isinstance(value, int | float) and math.isfinite(value)
            fields[match[1]] = value if is_number else str(value)
    return fields
