"""From words to a configuration, without starting anything."""

import argparse
import re
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from serve_app.cli import main as cli
from serve_app.config import BUNDLED_MODEL, ServiceConfig


def _config(*words: str) -> ServiceConfig:
    arguments: argparse.Namespace = cli._parser().parse_args(words)
    return cli._config_of(arguments)


def test_with_no_words_the_bundled_model_is_served_on_this_machine_alone() -> None:
    config = _config("serve")
    assert config.engine.model.path == BUNDLED_MODEL
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.telemetry.otlp_endpoint is None


def test_flags_win_over_the_file_and_leave_the_rest_of_it_alone(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("engine: {model: {path: /m, dtype: float32}}\nport: 9000\nhost: 0.0.0.0\n")
    flags = ("--port", "9001", "--verify-tp", "2", "--draft-tp", "4")
    config = _config("serve", "--config", str(file), *flags)
    assert config.engine.model.path == Path("/m")
    assert config.engine.model.dtype == "float32"
    assert config.engine.parallel.verify_tensor_parallel_size == 2
    assert config.engine.parallel.draft_tensor_parallel_size == 4
    assert (config.host, config.port) == ("0.0.0.0", 9001)


def test_any_key_can_be_set_and_is_checked() -> None:
    config = _config("serve", "--set", "engine.scheduler.overlap=false", "--set", "app_name=x")
    assert config.engine.scheduler.overlap is False
    assert config.app_name == "x"
    with pytest.raises(ConfigError, match=r"engine\.scheduler\.overlapp: Extra inputs"):
        _config("serve", "--set", "engine.scheduler.overlapp=false")
    with pytest.raises(ConfigError, match="host is 'x', expected a section"):
        _config("serve", "--host", "x", "--set", "host.name=y")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("model_name=@x", r"found no YAML \(found character '@' that cannot start any token\)"),
        ("model_name=[", r"found no YAML .* put a text into quotes of its own"),
        ("model_name=2026-13-45", r"found no YAML \(month must be in 1\.\.12"),
        ("model_name=#x", "found no value, expected one: write null"),
        ("model_name=", "found no value, expected one: write null"),
    ],
)
def test_a_value_that_is_none_is_named_with_its_argument(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^--set {re.escape(setting)}: {complaint}"):
        _config("serve", "--set", setting)
    with pytest.raises(ConfigError, match=f"^--default {re.escape(setting)}: {complaint}"):
        cli._defaults([setting])


def test_null_and_quoted_texts_are_values() -> None:
    for null in ("null", "~", " Null "):
        assert _config("serve", "--set", f"engine.model.head={null}").engine.model.head is None
        assert cli._defaults([f"stop={null}"]) == {"stop": None}
    assert cli._defaults(["stop='#'", 'user="2026-01-01"', 'logit_bias={"5": 10}']) == {
        "stop": "#",
        "user": "2026-01-01",
        "logit_bias": {"5": 10},
    }


@pytest.mark.parametrize(
    "setting", ["user=2026-01-01", "logit_bias={5: 10}", "temperature=.nan", "stop=!!set {a}"]
)
def test_a_default_is_something_that_json_has_a_form_for(setting: str) -> None:
    complaint = rf"^--default {re.escape(setting)}: found .*, which JSON has no form for"
    with pytest.raises(ConfigError, match=complaint):
        cli._defaults([setting])


def test_a_tree_is_named_by_a_flag_and_its_form_by_the_configuration() -> None:
    words = ("serve", "--tree", "static", "--set", "engine.speculation.tree.widths=[3, 1]")
    tree = _config(*words).engine.speculation.tree
    assert (tree.shape, tree.widths) == ("static", (3, 1))
    assert [tree.width_at(depth, "static") for depth in range(3)] == [3, 1, 1]
    rejection = ("--set", "engine.speculation.acceptance=rejection")
    with pytest.raises(ConfigError, match="rejection sampling judges chains"):
        _config("serve", "--tree", "dynamic", *rejection)
    assert _config("serve", *rejection).engine.speculation.tree.shape == "none"


def test_pipelines_sets_both_bounds() -> None:
    pipelines = _config("serve", "--pipelines", "3").pipelines
    assert (pipelines.min_count, pipelines.max_count) == (3, 3)


def test_a_collector_in_the_environment_is_used_unless_another_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert _config("serve").telemetry.otlp_endpoint == "http://collector:4318"
    named = _config("serve", "--otlp-endpoint", "http://other:4318")
    assert named.telemetry.otlp_endpoint == "http://other:4318"


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match=r"x\.yaml: found list, expected a mapping"):
        _config("serve", "--config", str(file))
    file.write_text("a: [")
    with pytest.raises(ConfigError, match=r"x\.yaml: not YAML"):
        _config("serve", "--config", str(file))


def test_commands_of_other_parts_get_their_own_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["plan", "--help"])
    assert leaving.value.code == 0
    assert "--exit-layer" in capsys.readouterr().out


def test_a_model_that_is_not_there_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x", "--config", "/no/such.yaml"]) == 2
    assert capsys.readouterr().err.startswith("eesd: /no/such.yaml: No such file")


def test_a_command_that_is_none_is_told_of_all_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["bench", "nope"])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert all(repr(name) in error for name in ("serve", "bench exact", "controllers", "distill"))
    assert cli.main(["--verbose", "plan"]) == 2
    assert capsys.readouterr().err.startswith("eesd: --verbose before a command")
