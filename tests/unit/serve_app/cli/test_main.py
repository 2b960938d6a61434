"""`eesd` as people type it, up to where the work begins."""

import os
import re
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.cli import main as cli
from serve_app.cli.bench import REMOVED as REMOVED_BENCHES

GROUPS = {
    (): (
        *("serve", "wait", "stop", "generate", "batch", "trace", "plan", "plan-fleet", "preflight"),
        "version",
        *("controllers", "pipelines", "bench", "distill"),
    ),
    ("controllers",): ("show", "save", "load", "pin", "unpin", "promote"),
    ("pipelines",): ("list", "drain", "undrain"),
    ("bench",): ("offline", "online", "exact", "batch", "costs", "control", "chaos"),
    ("distill",): ("run", "collect", "train", "calibrate", "evaluate", "sweep", "refresh"),
}
COMMANDS = [(*group, name) for group, names in GROUPS.items() for name in names]
ROOT = Path(__file__).parents[4]
HEAVY = ("torch", "numpy", "ray", "transformers", "pydantic", "httpx", "rich")


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_lists_its_commands(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*group, "--help"]) == 0
    listed = capsys.readouterr().out
    lines = listed[listed.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in lines if not line.startswith("  exact --random")] == list(
        GROUPS[group]
    )
    assert not any(line.endswith("...") for line in lines)


@pytest.mark.parametrize("name", REMOVED_BENCHES)
def test_a_removed_benchmark_is_answered_with_its_replacement(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", name, "--quick"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"eesd: `eesd bench {name}` was removed: use {REMOVED_BENCHES[name]}"
    for file in re.findall(r"tests/[\w/]+\.py", line):
        assert (ROOT / file).exists()
    for target in re.findall(r"`make ([\w-]+)", line):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("group", [(), ("bench",), ("distill",)])
def test_a_group_without_a_command_lists_them_too(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(group) == 2
    listed = capsys.readouterr().err
    assert cli.main([*group, "--help"]) == 0
    assert capsys.readouterr().out == listed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_by_its_own_name(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: eesd {' '.join(command)} ")


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        (("bnech",), "bench"),
        (("bench", "exat"), "exact"),
        (("controllers", "unpni"), "unpin"),
        (("distill", "trian"), "train"),
        (("serve", "--modle", "x"), "--model"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(
    typo: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typo) == 2
    error = capsys.readouterr().err
    assert error.startswith("Usage: eesd ")
    assert meant in error.splitlines()[-1]


def test_help_imports_nothing_that_takes_long() -> None:
    script = (
        "import sys; from serve_app.cli.main import main; status = main(['--help'])\n"
        f"heavy = ' '.join(name for name in {HEAVY} if name in sys.modules)\n"
        "sys.exit(heavy or status or len(sys.modules) > 310 and f'{len(sys.modules)} modules')"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    after = os.times()
    spent_s = after.children_user + after.children_system - before.children_user
    spent_s -= before.children_system
    assert done.stderr == ""
    assert "Commands:" in done.stdout
    assert spent_s < 0.7  # of processor time: the wall clock depends on what else is running


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("serve",), ("--host", "127.0.0.1")),
        (("generate", "x"), ()),
        (("batch", "in", "out"), ()),
        (("bench", "chaos"), ()),
    ],
)
@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("engine.model.colour=red", "eesd: engine.model.colour: unknown key, found 'red'; known: "),
        ("engine.cache.num_pages=many", "eesd: engine.cache.num_pages: Input should be a valid"),
        ("host.x=1", "eesd: host"),
        ("port", "eesd: --set port: expected KEY=VALUE"),
    ],
)
def test_every_command_with_a_configuration_checks_settings_alike(
    command: tuple[str, ...],
    words: tuple[str, ...],
    setting: str,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*command, *words, "--set", setting]) == 2
    error = capsys.readouterr().err
    assert error.startswith(complaint)
    assert error.count("\n") == 1


def test_chaos_names_the_value_that_a_setting_goes_through(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "chaos", "--port", "7", "--set", "port.x=1"]) == 2
    assert capsys.readouterr().err == (
        "eesd: port.x: port is 7, expected a section: set port itself\n"
    )


def test_chaos_refuses_a_fault_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "chaos", "--kinds", "hang", "earthquake"]) == 2
    assert capsys.readouterr().err.startswith(
        "eesd: found fault kind 'earthquake', expected one of: verify rank"
    )


def test_a_model_that_is_not_there_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x", "--config", "/no/such.yaml"]) == 2
    assert capsys.readouterr().err.startswith("eesd: /no/such.yaml: No such file")


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_is_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 0
    assert capsys.readouterr().out.startswith("eesd")


@pytest.mark.parametrize(
    "command",
    [("plan", "--model", "x", "--exit-layer", "1"), ("preflight",), ("bench", "exact", "--case=x")]
    + [("bench", name) for name in GROUPS["bench",]],
)
def test_what_a_command_runs_takes_the_options_that_it_declares(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def load(name: str) -> SimpleNamespace:
        calls.append(name)
        return SimpleNamespace(main=calls.append)

    monkeypatch.setattr("eesd_dist.command_line.import_module", load)
    assert cli.main(command) == 0
    module, options = calls
    (parameter,) = signature(import_module(module).main).parameters.values()
    assert parameter.annotation is type(options)
