"""Command lines: functions as commands, dataclasses as groups of options, errors as exit codes.

typer declares and parses options and prints usage. This module adds what all commands share. A
parameter that is a dataclass becomes one option per field, so that commands can share options. Text
in an annotation is the option's help, after its name where that differs from the field's:
`exit_layer: Annotated[int, "--exit N: layers of the draft stage"]`. A tuple is an option with
several values.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from typer import Context, Exit, Option, Typer
from typer.core import TyperCommand

from eesd_dist.errors import ConfigError, EesdError, RequestError, os_error_text
from eesd_dist.removed import replacement_of

Run = Callable[..., int | None]
Conversion = Callable[[Any], object]
"""Runs a command and returns its exit status; None is 0."""


def group(name: str, **settings: Any) -> Typer:
    """Returns a program, or a command with subcommands, which it lists when none is given."""
    defaults = {
        "add_completion": False,
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": ["--help", "-h"], "max_content_width": 100},
    }
    return Typer(name=name, **{**defaults, **settings})


def add_command(
    app: Typer,
    run: Run,
    *,
    name: str | None = None,
    help: str | None = None,
    defaults: Mapping[str, object] | None = None,
    conversions: Mapping[str, Conversion] | None = None,
) -> None:
    """Makes `run` a command; the first sentence of its docstring is its line in the list.

    `defaults` replace those of parameters and fields; `conversions` change values that are not
    None.
    """
    app.command(name, cls=_Command, help=help)(_flattened(run, defaults or {}, conversions or {}))


def add_module(app: Typer, name: str, options: type, module: str, **settings: Any) -> None:
    """Makes `main` of a module a command with these options.

    The module is imported when the command runs; the help is the docstring of the options.
    """

    def run(options: Any) -> int | None:
        status: int | None = import_module(module).main(options)
        return status

    run.__annotations__["options"] = options
    add_command(app, run, name=name, help=options.__doc__, **settings)


def add_callback(app: Typer, run: Run) -> None:
    """Runs `run` before every command of a group; its docstring describes the group."""
    app.callback()(_flattened(run, {}, {}))


def program_of(run: Run, **settings: Any) -> Typer:
    """Returns a program of one command, with the settings of `add_command`."""
    app = group(run.__name__)
    add_command(app, run, **settings)
    return app


def run_app(app: Typer, words: Sequence[str], *, program: str) -> int:
    """Runs one command and returns the exit status of the process.

    2: the usage, the configuration or a file is wrong; 1: other errors of this project, on one
    line each; 130: interrupted.
    """
    try:
        app(list(words), prog_name=program)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except (ConfigError, RequestError) as error:
        return _failed(program, str(error), status=2)
    except EesdError as error:
        return _failed(program, str(error), status=1)
    except OSError as error:  # a file in place of a folder, a full disk
        return _failed(program, os_error_text(error), status=2)
    return 0


def run_command(run: Run, words: Sequence[str], *, program: str) -> int:
    """Does the same for a program of one command."""
    return run_app(program_of(run), words, program=program)


def given(options: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are not None, to pass to a callee with defaults."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def _flattened(
    run: Run, defaults: Mapping[str, object], conversions: Mapping[str, Conversion]
) -> Callable[..., None]:
    """Returns the function with a signature for typer, in which every option is a parameter."""
    parameters = signature(run).parameters

    @wraps(run)
    def call(**values: Any) -> None:
        for name in conversions.keys() & values.keys():
            if values[name] is not None:
                values[name] = conversions[name](values[name])
        try:
            status = run(
                **{name: _gathered(parameter, values) for name, parameter in parameters.items()}
            )
        except BrokenPipeError:  # the reader of the output has closed it: not an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 0
        if status:
            raise Exit(status)

    leaves = [leaf for parameter in parameters.values() for leaf in _leaves(parameter, defaults)]
    call.__signature__ = Signature(leaves)  # type: ignore[attr-defined]
    return call


class _Command(TyperCommand):
    """A command with options of several values: they take all words up to the next option, as in
    `--exits 1 2 4`.

    Not in a command with positional arguments, which such an option would consume. The option can
    be repeated in any command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_removed(args, options={name for param in self.params for name in param.opts})
        if all(param.param_type_name == "option" for param in self.params):
            repeatable = {name for param in self.params if param.multiple for name in param.opts}
            args = list(_repeated(args, repeatable))
        return super().parse_args(ctx, args)


def _refuse_removed(words: Sequence[str], *, options: set[str]) -> None:
    for word in words:
        flag = word.partition("=")[0]
        replacement = None if flag in options else replacement_of(flag)
        if replacement is not None:
            raise ConfigError(f"{flag}: {replacement}")


def _repeated(words: Sequence[str], repeatable: set[str]) -> Iterator[str]:
    """Yields the words with `--exits 1 2` written as `--exits 1 --exits 2`."""
    option, is_first = "", False
    for word in words:
        if word.startswith("-"):
            option, is_first = word if word in repeatable else "", True
        elif option and not is_first:
            yield option
        else:
            is_first = False
        yield word


def _leaves(parameter: Parameter, defaults: Mapping[str, object]) -> Iterator[Parameter]:
    kind = parameter.annotation
    if isinstance(kind, type) and is_dataclass(kind):
        for field in signature(kind).parameters.values():
            yield from _leaves(field, defaults)
    elif kind is Context:
        yield parameter
    else:
        default = defaults.get(parameter.name, parameter.default)
        yield _declared(parameter.replace(default=default))


def _gathered(parameter: Parameter, values: dict[str, Any]) -> Any:
    kind = parameter.annotation
    if isinstance(kind, type) and is_dataclass(kind):
        fields = signature(kind).parameters
        return kind(**{name: _gathered(field, values) for name, field in fields.items()})
    value = values[parameter.name]
    return tuple(value) if isinstance(value, list) else value


def _declared(parameter: Parameter) -> Parameter:
    """Returns the parameter for typer: with an `Option`, and a list in place of a tuple."""
    kind, info = parameter.annotation, ""
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
    if isinstance(info, str):
        names, _, text = info.partition(": ") if info.startswith("--") else ("", "", info)
        name, _, metavar = names.partition(" ")
        default = parameter.default
        paths = default if isinstance(default, tuple) else (default,)
        # The help shows default paths, except absolute ones, which depend on the installation.
        is_ours = any(isinstance(path, Path) and path.is_absolute() for path in paths)
        name = name or f"--{parameter.name.replace('_', '-')}"
        info = Option(name, help=text, metavar=metavar or None, show_default=not is_ours)
    if get_origin(kind) is tuple:
        element, info = get_args(kind)[0], copy(info)
        label, kind = getattr(element, "__name__", ""), list[element]  # type: ignore[valid-type]
        if get_origin(element) is Literal:  # typer does not support lists of Literals
            choices = get_args(element)
            label, kind, info.parser = "|".join(choices), list[str], partial(_one_of, choices)
        info.metavar = info.metavar or f"<{label.lower()}>..."
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])


def _one_of(choices: Sequence[str], word: str) -> str:
    if word not in choices:
        raise ValueError(f"found {word!r}, expected one of {', '.join(choices)}")
    return word


def _failed(program: str, message: str, *, status: int) -> int:
    sys.stderr.write(f"{program}: {message}\n")
    return status
