"""Texts in the corpus of grammars match them on the device, with and without speculation."""

from collections.abc import Iterator

import pytest
import torch

from eesd_dist.engine.local import LocalEngine
from eesd_dist.text.grammars import GrammarCompiler

pytest.importorskip("jsonschema", reason="jsonschema judges the texts")

from tests.unit.text.test_grammar_corpus import (  # noqa: F401
    corpus_engine,
    grammars,
    plain,
    requests,
    test_every_text_matches_or_begins_one_that_does,
    test_speculation_changes_no_text,
    tokenizer,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(device: torch.device, grammars: GrammarCompiler) -> Iterator[LocalEngine]:  # noqa: F811
    if device.type == "cpu":
        pytest.skip("minutes on a CPU: a slow test of tests/unit")
    with corpus_engine("cuda", grammars) as engine:
        yield engine
