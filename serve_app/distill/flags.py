"""Command-line flags made of dataclasses: one flag for each field, its annotation the help text.

`rows: Annotated[int, "of one step"] = 16` is `--rows`, 16 unless given. A tuple takes several
values, a Literal one of its choices, a bool none; a field that is a dataclass gives the flags of
its own fields.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_NAMES = {
    "exit_layer": "exit",
    "learning_rate": "rate",
    "checkpoint_every_s": "checkpoint-every",
    "temperature": "loss-temperature",
}
"""Of fields whose flag is called otherwise."""

T = TypeVar("T")


def add_flags(parser: ArgumentParser, options: Any, **defaults: object) -> None:
    """`defaults` take the place of the dataclass's own, or of none."""
    for name, kind, help_text, default in _fields_of(options):
        if is_dataclass(kind):
            add_flags(parser, kind, **defaults)
            continue
        default = defaults.get(name, default)
        form = {"action": "store_true"} if kind is bool else _values_of(kind)
        parser.add_argument(
            f"--{_NAMES.get(name, name).replace('_', '-')}",
            dest=name,
            help=help_text,
            required=default is MISSING,
            default=default,
            **form,
        )


def read_flags(options: Callable[..., T], words: Namespace, **given: object) -> T:
    """The dataclass with the values of its flags, and those of `given`."""
    values: dict[str, object] = {}
    for name, kind, _, _ in _fields_of(options):
        if name not in given:
            is_nested = is_dataclass(kind)
            value: object = read_flags(kind, words) if is_nested else getattr(words, name)
            values[name] = tuple(value) if isinstance(value, list) else value
    return options(**values, **given)


def _fields_of(options: Any) -> Iterator[tuple[str, Any, str | None, object]]:
    """Name, type, help text and default."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        kind, *texts = (
            get_args(hints[field.name])
            if get_origin(hints[field.name]) is Annotated
            else (hints[field.name],)
        )
        yield field.name, kind, texts[0] if texts else None, field.default


def _values_of(kind: Any) -> dict[str, Any]:
    """How argparse reads one or more values."""
    if NoneType in get_args(kind):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        return {"nargs": "+", **_values_of(get_args(kind)[0])}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind}
