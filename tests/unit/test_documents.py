"""Links and file names in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
CODE_PATH = re.compile(r"`((?:eesd_dist|serve_app|cluster|infra|tests|docs)/[\w./-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_of_a_document_exist(document: Path) -> None:
    text = document.read_text()
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    missing += [path for path in CODE_PATH.findall(text) if not (ROOT / path).exists()]
    assert missing == []


def test_the_changelog_names_the_version_or_calls_it_unreleased() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
