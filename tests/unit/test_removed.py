"""A name of an earlier version is refused with its replacement."""

import pytest
from pydantic import ValidationError

from eesd_dist.command_line import run_command
from eesd_dist.control.registry import entry_of
from eesd_dist.errors import ConfigError
from eesd_dist.removed import REPLACEMENTS, replacement_of
from serve_app.config import service_config
from serve_app.openai.errors import http_error_of_fields
from serve_app.openai.schema.bodies import CompletionFields

KEYS = [name for name in REPLACEMENTS if "." in name and " " not in name]
_CONTROLLER = "speculation.controller: "
CONTROLLERS = [
    name.removeprefix(_CONTROLLER) for name in REPLACEMENTS if name.startswith(_CONTROLLER)
]
FLAGS = [name for name in REPLACEMENTS if name.startswith("--")]


@pytest.mark.parametrize("key", KEYS)
def test_a_removed_key_is_refused_with_what_replaces_it(key: str) -> None:
    section, name = key.split(".")
    engine = {"model": {"path": "/model"}, section: {name: 1}}
    with pytest.raises(ConfigError, match=f"engine.{key}: unknown key, found 1; it was removed: "):
        service_config({"engine": engine})


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_removed_controller_is_refused_with_what_replaces_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"controller is '{name}', .*; it was removed: use "):
        entry_of(name)
    with pytest.raises(ValidationError) as refusal:
        CompletionFields.model_validate({"prompt": "p", "speculation": {"controller": name}})
    answer = http_error_of_fields(refusal.value.errors())
    assert answer.message.startswith("speculation.controller: Input should be ")
    assert "; it was removed: use " in answer.message


def test_a_removed_value_is_refused_with_what_replaces_it() -> None:
    engine = {"model": {"path": "/model"}, "speculation": {"stop_rule": "steady"}}
    with pytest.raises(ConfigError, match=r"found 'steady'; it was removed: use auto"):
        service_config({"engine": engine})


@pytest.mark.parametrize("flag", FLAGS)
def test_a_removed_flag_is_refused_with_what_replaces_it(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: None, [f"{flag}=both"], program="eesd") == 2
    assert capsys.readouterr().err.startswith(f"eesd: {flag}: it was removed: ")


def test_other_names_have_no_replacement() -> None:
    assert replacement_of("draft_ahead") is None
    assert replacement_of("speculation.seed") is None
