"""Dataclasses as flags: what is typed becomes their values, what is not keeps their defaults."""

from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from serve_app.distill.flags import add_flags, read_flags
from serve_app.distill.main import COMMANDS, main


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    learning_rate: Annotated[float, "highest"] = 0.5
    head: Annotated[Literal["own", "shared"], "which"] = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    model: Annotated[Path, "folder"]
    exits: Annotated[tuple[int, ...], "layers"] = (1, 2)
    limit: Annotated[int | None, "at most"] = None
    is_fast: Annotated[bool, "or slow"] = False
    seed: int = 3
    inner: Inner = field(default_factory=Inner)


def read(*words: str) -> Outer:
    parser = ArgumentParser()
    add_flags(parser, Outer)
    return read_flags(Outer, parser.parse_args(words))


def test_what_is_not_typed_keeps_its_default() -> None:
    assert read("--model", "m") == Outer(model=Path("m"))


def test_every_field_has_a_flag() -> None:
    typed = "--model m --exits 4 5 6 --limit 7 --is-fast --seed 8 --rate 1e-3 --head shared"
    assert read(*typed.split()) == Outer(
        model=Path("m"),
        exits=(4, 5, 6),
        limit=7,
        is_fast=True,
        seed=8,
        inner=Inner(learning_rate=1e-3, head="shared"),
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "required: --model"),
        ("--model m --head other", "invalid choice: 'other'"),
        ("--model m --exits one", "--exits: invalid int value: 'one'"),
    ],
)
def test_words_that_fit_no_field_are_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(*words.split())
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_its_flags_mean(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert "--model MODEL" in told
    assert "folder of the target (the bundled one)" in " ".join(told.split())
