"""`KEY=VALUE` words: one parser for every command that takes them.

A value is read as in a configuration file, except that null has to be written. The tree that is
built here is checked by `serve_app.config`.
"""

from collections.abc import Sequence

import yaml

from eesd_dist.errors import ConfigError

Tree = dict[str, object]


def parse_setting(option: str, word: str, *, form: str = "KEY=VALUE") -> tuple[str, object]:
    """Splits `word`, the value of `option`, at its first `=` and reads what follows as YAML."""
    key, equals, text = word.partition("=")
    if not (key and equals):
        raise ConfigError(f"{option} {word}: expected {form}")
    return key, _value_of(f"{option} {word}", text)


def apply_settings(tree: Tree, words: Sequence[str]) -> None:
    """Puts every `--set KEY=VALUE` into `tree`; a later one wins."""
    for word in words:
        key, value = parse_setting("--set", word)
        put(tree, key, value)


def put(tree: Tree, key: str, value: object) -> None:
    """Sets a dotted key; creates missing sections."""
    *sections, last = key.split(".")
    for depth, section in enumerate(sections, start=1):
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            path = ".".join(sections[:depth])
            raise ConfigError(f"{key}: {path} is {below!r}, expected a section: set {path} itself")
        tree = below
    tree[last] = value


def is_missing(tree: Tree, key: str) -> bool:
    node: object = tree
    for name in key.split("."):
        if not isinstance(node, dict) or node.get(name) is None:
            return True
        node = node[name]
    return False


def _value_of(source: str, text: str) -> object:
    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise ConfigError(
            f"{source}: found no YAML ({reason}), expected a value: put text into additional quotes"
        ) from error
    if value is None and text.strip().lower() not in ("null", "~"):
        raise ConfigError(
            f"{source}: found no value, expected one: write null, or put text into additional "
            "quotes"
        )
    return value
