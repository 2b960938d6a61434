"""Commands made of functions and dataclasses, in a program of two commands."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from typer import Argument, Typer, echo

from eesd_dist.command_line import add_callback, add_command, given, group, run_app, run_command
from eesd_dist.errors import ConfigError, EngineError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    folder: Annotated[Path | None, "where it grows"] = None
    port: Annotated[int, "its port"] = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    where: Where
    exit_layers: Annotated[tuple[int, ...], "layers to try"] = (1,)
    heads: Annotated[tuple[Literal["own", "shared"], ...], "kinds"] = ()
    shape: Annotated[Literal["none", "static"], "of the tree"] = "none"
    no_leaves: Annotated[bool, "--bare: without leaves"] = False
    height: float = 1.5


def grow(tree: Tree, seed: Annotated[int | None, "of the tree"] = None) -> int:
    """Grows a tree. And waters it."""
    echo(f"{tree.where.folder} {tree.where.port} {tree.exit_layers} {tree.heads} {tree.shape}")
    echo(f"{tree.no_leaves} {tree.height} {seed}")
    return 3


def fell(
    name: Annotated[str, Argument(metavar="NAME", help="which one")],
    notes: Annotated[tuple[str, ...], "may be repeated"] = (),
) -> None:
    """Fells a tree."""
    errors = {
        "config": ConfigError("found a bush"),
        "request": RequestError("not served"),
        "engine": EngineError("the saw is blunt"),
        "file": FileNotFoundError(2, "No such file or directory", "axe"),
        "stop": KeyboardInterrupt(),
    }
    if name in errors:
        raise errors[name]
    echo(f"{name} {notes}")


@pytest.fixture
def app() -> Typer:
    app = group("forest")
    add_callback(app, forest)
    add_command(app, grow)
    add_command(app, fell)
    return app


def forest() -> None:
    """A program."""


def test_a_dataclass_is_an_option_for_each_of_its_fields(
    app: Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["grow"], program="forest") == 3
    assert capsys.readouterr().out == "None 8000 (1,) () none\nFalse 1.5 None\n"
    words = ["grow", "--folder", "x", "--port=7", "--shape", "static", "--bare", "--seed", "1"]
    words += ["--height", "2"]
    assert run_app(app, words, program="forest") == 3
    assert capsys.readouterr().out == "x 7 (1,) () static\nTrue 2.0 1\n"


def test_an_option_with_several_values_takes_them_in_one_go_or_one_at_a_time(
    app: Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["--exit-layers", "1", "2", "--heads", "own", "shared"],
        ["--exit-layers", "1", "--heads", "own", "--exit-layers", "2", "--heads", "shared"],
        ["--exit-layers=1", "--exit-layers", "2", "--heads=own", "--heads=shared"],
    ):
        assert run_app(app, ["grow", *words], program="forest") == 3
        assert "(1, 2) ('own', 'shared')" in capsys.readouterr().out


def test_an_option_does_not_swallow_the_arguments_behind_it(
    app: Typer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["fell", "--notes", "a", "oak", "--notes", "b"], program="forest") == 0
    assert capsys.readouterr().out == "oak ('a', 'b')\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grow", "--port", "x"], "Invalid value for '--port'"),
        (["grow", "--shape", "round"], "'round' is not one of 'none', 'static'"),
        (["grow", "--heads", "own", "their"], "found 'their', expected one of own, shared"),
        (["grow", "--prot", "1"], "No such option: --prot (Possible options: --port)"),
        (["grow", "--no-bare"], "No such option: --no-bare"),
        (["grow", "1"], "unexpected extra argument"),
        (["fell"], "Missing argument 'NAME'"),
        (["gorw"], "No such command 'gorw'. Did you mean 'grow'?"),
    ],
)
def test_what_is_typed_wrong_is_named_with_status_2(
    app: Typer, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, words, program="forest") == 2
    error = capsys.readouterr().err
    assert error.startswith("Usage: forest")
    assert message in error


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("config", 2, "forest: found a bush\n"),
        ("request", 2, "forest: not served\n"),
        ("engine", 1, "forest: the saw is blunt\n"),
        ("file", 2, "forest: axe: No such file or directory\n"),
        ("stop", 130, ""),
    ],
)
def test_an_error_is_one_line_and_a_status(
    app: Typer, name: str, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["fell", name], program="forest") == status
    assert capsys.readouterr().err == line


def test_a_group_lists_its_commands(app: Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, [], program="forest") == 2
    listed = capsys.readouterr().err
    assert run_app(app, ["-h"], program="forest") == 0
    assert capsys.readouterr().out == listed
    assert listed.startswith("Usage: forest [OPTIONS] COMMAND [ARGS]...\n\n  A program.")
    assert "grow  Grows a tree.\n" in listed


def test_a_program_of_one_command_has_no_name_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(fell, ["elm"], program="axe") == 0
    assert capsys.readouterr().out == "elm ()\n"
    assert run_command(fell, ["--help"], program="axe") == 0
    assert capsys.readouterr().out.startswith("Usage: axe [OPTIONS] {NAME}\n\n  Fells a tree.")


def test_given_are_the_options_that_were_typed() -> None:
    assert given(Where()) == {"port": 8000}
    assert given(Where(folder=Path("x"))) == {"folder": Path("x"), "port": 8000}


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = (
        "import sys; from eesd_dist.command_line import run_command\n"
        "def count() -> None:\n"
        "    for number in range(10**6): print(number, flush=True)\n"
        "sys.exit(run_command(count, [], program='count'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as counting:
        assert counting.stdout is not None
        assert counting.stderr is not None
        assert counting.stdout.readline() == b"0\n"
        counting.stdout.close()
        assert counting.stderr.read() == b""
        assert counting.wait(30) == 0
