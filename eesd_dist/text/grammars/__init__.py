"""Grammars that a text has to match: which tokens may follow a text and its drafts."""

from eesd_dist.text.grammars.compiler import GrammarCompiler
from eesd_dist.text.grammars.forms import (
    any_json,
    json_schema,
    one_of,
    regular_expression,
    rules,
)
from eesd_dist.text.grammars.matcher import TokenMatcher

__all__ = [
    "GrammarCompiler",
    "TokenMatcher",
    "any_json",
    "json_schema",
    "one_of",
    "regular_expression",
    "rules",
]
