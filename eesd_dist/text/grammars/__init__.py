"""Grammars that a text has to match: which tokens may follow a text and its drafts."""

from eesd_dist.text.grammars.compiler import GrammarCompiler
from eesd_dist.text.grammars.constraints import TokenConstraint, constraint_of, masks_along
from eesd_dist.text.grammars.forms import (
    any_json,
    json_rule,
    json_schema,
    lark,
    one_of,
    regular_expression,
    rules,
)
from eesd_dist.text.grammars.matcher import TokenMatcher
from eesd_dist.text.grammars.probe import GrammarProbe

__all__ = [
    "GrammarCompiler",
    "GrammarProbe",
    "TokenConstraint",
    "TokenMatcher",
    "any_json",
    "constraint_of",
    "json_rule",
    "json_schema",
    "lark",
    "masks_along",
    "one_of",
    "regular_expression",
    "rules",
]
