"""Links, headings and file names in the documents exist."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from serve_app.cli import main as cli
from serve_app.cli.bench import REMOVED as REMOVED_BENCHES

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HISTORY = {ROOT / "CHANGELOG.md", *(ROOT / "docs/benchmarks").glob("*.md")}
"""Records, which may name commands of their time."""
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMAND = re.compile(r"\beesd ((?:bench )?[a-z]+)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CODE_PATH = re.compile(r"`((?:eesd_dist|serve_app|cluster|infra|tests|docs)/[\w./-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_of_a_document_exist(document: Path) -> None:
    text = document.read_text()
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [path for path in CODE_PATH.findall(text) if not (ROOT / path).exists()]
    missing += [
        test for path, test in TEST.findall(text) if f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


def test_headings_that_are_linked_to_exist() -> None:
    missing = [
        f"{document.relative_to(ROOT)}: {page}#{anchor}"
        for document in DOCUMENTS
        for page, anchor in ANCHOR.findall(document.read_text())
        if anchor not in _anchors(document.parent / page if page else document)
    ]
    assert missing == []


def test_the_changelog_names_the_version_or_calls_it_unreleased() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_command_in_the_documents_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    # After `eesd` in code: shell blocks and inline code, not prose.
    commands = _commands_in(set(DOCUMENTS) - HISTORY)
    removed = {f"bench {name}" for name in REMOVED_BENCHES}
    assert {"bench exact", "plan"} <= commands
    for command in sorted(commands | (_commands_in(HISTORY) - removed)):
        assert cli.main([*command.split(), "--help"]) == 0, command
    capsys.readouterr()


def _anchors(document: Path) -> set[str]:
    """Returns the names that GitHub gives to the headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(text))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def _commands_in(documents: Iterable[Path]) -> set[str]:
    text = "\n".join(document.read_text() for document in documents)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(
        r"`(eesd [^`\n]+)`", text
    )
    return {name for block in blocks for name in COMMAND.findall(block)}
