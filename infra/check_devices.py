"""Checks that code asks for a device in its backend alone.

    python infra/check_devices.py [ROOT]

What a device does in its own way is in `eesd_dist/backends`, found by `eesd_dist.devices`. Another
device is then one more package; a question such as `x.is_cuda` anywhere else is a place that it
would have to know. Benchmarks and the tools of `cluster` describe the machine, and may ask. Each
other folder has a number of questions that is allowed, and may only fall; the exit status is 1 if
there are more.
"""

import ast
import sys
from collections.abc import Iterator

from falling_counts import check

_QUESTIONS = frozenset({"is_available", "is_cuda", "is_cpu", "can_compile"})
"""Names of attributes and functions that tell one device from another."""
_TYPES = frozenset({"cpu", "cuda"})
"""Values of `device.type`."""
ALLOWED = {
    "eesd_dist/control": 0,
    "eesd_dist/distill": 0,
    "eesd_dist/engine": 2,
    "eesd_dist/llm": 0,
    "eesd_dist/model": 0,
    "eesd_dist/sampling": 0,
    "eesd_dist/transport": 0,
    "eesd_dist/workers": 0,
    "serve_app": 0,
}
"""Questions by folder. Lower a number when the check says so. The engine's are where the device is
chosen, in `engine.layout`."""


def main(arguments: list[str]) -> int:
    return check(
        arguments,
        questions_of,
        allowed=ALLOWED,
        noun="questions for a device",
        advice="ask `devices.backend_of` for what the device does in its own way",
    )


def questions_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields line number and text of each question for a device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name)) if name in _QUESTIONS:
                yield node.lineno, name
            case ast.Compare(left=ast.Attribute(attr="type"), comparators=[ast.Constant(value=v)]):
                if v in _TYPES:
                    yield node.lineno, f"type compared with {v!r}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
