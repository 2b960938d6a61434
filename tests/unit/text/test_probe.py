"""The process that compiles grammars of strangers: it has nothing of ours, and ends alone."""

import os
import sys
from pathlib import Path

import pytest

from eesd_dist.errors import RequestError
from eesd_dist.text.grammars import GrammarProbe, one_of, rules


def children() -> set[int]:
    folder = Path(f"/proc/{os.getpid()}/task")
    return {
        int(word) for task in folder.iterdir() for word in (task / "children").read_text().split()
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_child_has_no_variable_and_imports_no_file_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "resource", "llguidance", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("EESD_API_KEY", "s3cret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before, probe = children(), GrammarProbe()
    probe.check(one_of(["a"]))
    (child,) = children() - before
    process = Path("/proc") / str(child)
    assert (process / "environ").read_bytes() == b""
    assert (process / "cwd").readlink() == Path("/")


def test_a_grammar_that_ends_the_child_is_refused_and_the_next_one_is_not() -> None:
    probe = GrammarProbe()
    deep = "\n".join(f"r{number}: r{number + 1}" for number in range(60_000))
    with pytest.raises(RequestError, match="too much time or memory"):
        probe.check(rules(f'start: r0\n{deep}\nr60000: "a"'))
    probe.check(one_of(["a"]))
