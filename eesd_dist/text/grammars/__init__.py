"""Grammars that a text has to match: which tokens may follow a text and its drafts."""

from eesd_dist.text.grammars.compiler import GrammarCompiler, digest_of
from eesd_dist.text.grammars.constraints import (
    TokenConstraint,
    common,
    ends_of,
    is_allowed,
    lists_of,
    masks_along,
)
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
from eesd_dist.text.grammars.normal_schema import normal_schema
from eesd_dist.text.grammars.probe import GrammarProbe

__all__ = [
    "GrammarCompiler",
    "GrammarProbe",
    "TokenConstraint",
    "TokenMatcher",
    "any_json",
    "common",
    "digest_of",
    "ends_of",
    "is_allowed",
    "json_rule",
    "json_schema",
    "lark",
    "lists_of",
    "masks_along",
    "normal_schema",
    "one_of",
    "regular_expression",
    "rules",
]
