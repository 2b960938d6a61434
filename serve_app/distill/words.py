"""What the steps of `eesd distill` say to whoever started them: one line at a time, on stderr."""

import sys
from collections.abc import Callable

Say = Callable[[str], None]


def on_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
