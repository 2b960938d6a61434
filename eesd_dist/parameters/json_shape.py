"""Bounds the shape of JSON before it is parsed."""

import re

import numpy as np

from eesd_dist.errors import RequestError

_MAX_JSON_CONTAINERS = 16_384
"""Four for each message of the longest conversation. Parsing a million takes a second."""
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""Matches from every quotation mark, to the end if need be: time is linear in the body."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Opening brackets are 1 and closing ones -1 as 8-bit integers."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json(body: bytes | bytearray, *, max_depth: int) -> None:
    """Raises RequestError for JSON with too many lists and objects, or too deep ones, without
    parsing it."""
    if b"\0" in body:
        raise RequestError("found a NUL byte in the body, expected JSON in UTF-8")
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    brackets = _JSON_STRING.sub(b"", body).translate(_STEPS, _NOT_BRACKETS)
    steps = np.frombuffer(brackets, np.int8)
    num_opened = int((steps > 0).sum())
    if num_opened > _MAX_JSON_CONTAINERS:
        raise RequestError(
            f"found {num_opened} lists and objects in the body, expected at most "
            f"{_MAX_JSON_CONTAINERS}: send several requests"
        )
    depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
    if depth > max_depth:
        raise RequestError(
            f"the body is nested {depth} levels deep, expected at most {max_depth}: send flatter "
            "JSON"
        )
