"""`KEY=VALUE` words: what they set, and what is said of those that set nothing."""

import re

import pytest

from eesd_dist.errors import ConfigError
from serve_app.service.settings import Tree, apply_settings, is_missing, parse_setting, put


def _tree(*words: str, **tree: object) -> Tree:
    apply_settings(tree, words)
    return tree


def test_a_value_is_read_as_in_a_file_and_put_where_its_key_says() -> None:
    assert _tree("a.b=[1, x]", "a.c=false", "d=text", port=1, a={"b": 0, "e": 2}) == {
        "a": {"b": [1, "x"], "c": False, "e": 2},
        "d": "text",
        "port": 1,
    }
    assert _tree("a=1", "a=2") == {"a": 2}
    assert _tree("a=b=c") == {"a": "b=c"}


def test_null_and_quoted_texts_are_values() -> None:
    for null in ("null", "~", " Null "):
        assert parse_setting("--set", f"a={null}") == ("a", None)
    assert parse_setting("--set", "a='#'") == ("a", "#")
    assert parse_setting("--set", 'a="2026-01-01"') == ("a", "2026-01-01")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("model_name=@x", r"found no YAML \(found character '@' that cannot start any token\)"),
        ("model_name=[", r"found no YAML .* put text into additional quotes"),
        ("model_name=2026-13-45", r"found no YAML \(month must be in 1\.\.12"),
        ("model_name=#x", "found no value, expected one: write null"),
        ("model_name=", "found no value, expected one: write null"),
    ],
)
@pytest.mark.parametrize("option", ["--set", "--default"])
def test_a_value_that_is_none_is_named_with_its_option(
    option: str, setting: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{option} {re.escape(setting)}: {complaint}"):
        parse_setting(option, setting)


@pytest.mark.parametrize("word", ["port", "=1", ""])
def test_a_word_without_a_key_and_a_value_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"^--set {word}: expected KEY=VALUE$"):
        _tree(word)


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("port.x=1", "port.x: port is 8000, expected a section: set port itself"),
        ("a.b.c.d=1", "a.b.c.d: a.b is 'text', expected a section: set a.b itself"),
    ],
)
def test_a_key_below_a_value_is_refused(word: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(complaint)}$"):
        _tree(word, port=8000, a={"b": "text"})


def test_what_is_null_is_missing() -> None:
    tree: Tree = {"a": {"b": None, "c": 0}}
    put(tree, "d.e", "x")
    assert is_missing(tree, "a.b")
    assert is_missing(tree, "a.x.y")
    assert not is_missing(tree, "a.c")
    assert not is_missing(tree, "d.e")
