"""The kinds of a run: those that this machine allows, or a clear error."""

import pytest

from eesd_dist.errors import ConfigError
from serve_app.bench.chaos import command
from serve_app.bench.chaos.command import possible_kinds
from serve_app.bench.chaos.faults import FAULT_KINDS

_WHY = "kernel.yama.ptrace_scope is 1"


def test_without_the_rights_of_a_debugger_kinds_are_left_out_and_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "why_untraceable", lambda: _WHY)
    kinds, left_out = possible_kinds(())
    assert set(FAULT_KINDS) - set(kinds) == {
        "stuck thread",
        "stuck thread with the GIL",
        "silent peer",
    }
    assert f"stuck thread: {_WHY}" in left_out
    with pytest.raises(ConfigError, match=f"'silent peer', which needs ptrace: {_WHY}"):
        possible_kinds(["hang", "silent peer"])
    assert possible_kinds(["hang"]) == (("hang",), [])


def test_with_them_every_default_kind_is_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "why_untraceable", lambda: "")
    assert possible_kinds(()) == (tuple(FAULT_KINDS), [])
