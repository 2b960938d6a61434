"""The workload class of a request: requests of a class share a pooled prior.

A client may name the class; otherwise it is the kind of request and, if configured, its band of
temperature, since drafts are accepted less often at higher temperatures. Classes change how long a
text takes, never the text.
"""

import re
from itertools import product
from typing import Literal, get_args

from eesd_dist.errors import RequestError
from eesd_dist.types import GREEDY_BELOW

Kind = Literal["chat", "completion"]

WORKLOAD_HEADER = "x-eesd-workload"
WORKLOAD_PATTERN = r"^[A-Za-z0-9._/-]{1,64}$"
_NAME = re.compile(WORKLOAD_PATTERN)
_BANDS = ((0.5, "t0.5"), (1.0, "t1"))
"""Upper limit and name of each band; temperatures above the last limit are `hot`."""
_GREEDY, _HOT = "t0", "hot"
_KINDS = get_args(Kind)
UNNAMED_CLASSES = frozenset(
    {
        *_KINDS,
        *map("/".join, product(_KINDS, (_GREEDY, *(name for _, name in _BANDS), _HOT))),
    }
)
"""Classes of requests that name none."""


def workload_of(
    name: str | None,
    *,
    kind: Kind,
    temperature: float,
    by_temperature: bool,
) -> str:
    """Returns the name, or without one e.g. `chat/t0`."""
    if name is not None:
        return name
    return f"{kind}/{_band(temperature)}" if by_temperature else kind


def checked_workload(header: str | None) -> str | None:
    """Returns the header's value. Raises RequestError if it is invalid."""
    if header is not None and not _NAME.fullmatch(header):
        raise RequestError(
            f"{WORKLOAD_HEADER} is {header[:80]!r}: expected up to 64 letters, digits or ._/-",
            param=WORKLOAD_HEADER,
        )
    return header


def _band(temperature: float) -> str:
    if temperature < GREEDY_BELOW:
        return _GREEDY
    return next((name for limit, name in _BANDS if temperature <= limit), _HOT)
