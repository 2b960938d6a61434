"""From options to a configuration, without starting anything."""

from pathlib import Path

import pytest

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.errors import ConfigError
from serve_app.cli.configuration import EngineFlags, ServiceFlags, config_of
from serve_app.config import ServiceConfig


def _set(*words: str) -> ServiceConfig:
    return config_of(EngineFlags(set=words))


def test_without_options_the_bundled_model_is_served_on_this_machine_alone() -> None:
    config = config_of(EngineFlags(), ServiceFlags())
    assert config.engine.model.path == BUNDLED_MODEL
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.telemetry.otlp_endpoint is None


def test_the_bundled_model_has_a_name_where_no_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = config_of(EngineFlags())
    assert config_of(EngineFlags(model=Path("bundled"))) == default
    assert default.engine.model.path == BUNDLED_MODEL
    chosen = EngineFlags(model=Path("bundled"), set=("engine.model.path=/m",))
    assert config_of(chosen).engine.model.path == Path("/m")
    Path("bundled").mkdir()
    assert config_of(EngineFlags(model=Path("bundled"))).engine.model.path == Path("bundled")


def test_options_win_over_the_file_and_leave_the_rest_of_it_alone(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("engine: {model: {path: /m, dtype: float32}}\nport: 9000\nhost: 0.0.0.0\n")
    config = config_of(
        EngineFlags(
            config=file, verify_tp=2, draft_tp=4, max_draft_tokens=0, kv_cache_dtype="bfloat16"
        ),
        ServiceFlags(port=9001),
    )
    assert config.engine.model.path == Path("/m")
    assert config.engine.model.dtype == "float32"
    assert config.engine.cache.kv_cache_dtype == "bfloat16"
    assert config.engine.parallel.verify_tensor_parallel_size == 2
    assert config.engine.parallel.draft_tensor_parallel_size == 4
    assert config.engine.speculation.max_draft_tokens == 0
    assert (config.host, config.port) == ("0.0.0.0", 9001)


def test_any_key_can_be_set_and_is_checked() -> None:
    config = _set("engine.scheduler.overlap=false", "app_name=x")
    assert config.engine.scheduler.overlap is False
    assert config.app_name == "x"
    with pytest.raises(ConfigError, match=r"overlapp: unknown key, .*did you mean overlap\?"):
        _set("engine.scheduler.overlapp=false")
    with pytest.raises(ConfigError, match=r"host\.name: host is 'x', expected a section"):
        config_of(EngineFlags(set=("host.name=y",)), ServiceFlags(host="x"))
    with pytest.raises(ConfigError, match="port: Input should be a valid integer"):
        _set("port.x=1")


def test_set_wins_over_an_option_and_null_is_a_value() -> None:
    engine = EngineFlags(head=Path("/h"), set=("engine.model.head=null", "port=9002"))
    config = config_of(engine, ServiceFlags(port=9001))
    assert config.engine.model.head is None
    assert config.port == 9002


def test_a_tree_is_named_by_an_option_and_its_form_by_the_configuration() -> None:
    tree = config_of(
        EngineFlags(tree="static", set=("engine.speculation.tree.widths=[3, 1]",))
    ).engine.speculation.tree
    assert (tree.shape, tree.widths) == ("static", (3, 1))
    assert [tree.width_at(depth, "static") for depth in range(3)] == [3, 1, 1]
    rejection = ("engine.speculation.acceptance=rejection",)
    with pytest.raises(ConfigError, match="rejection sampling judges chains"):
        config_of(EngineFlags(tree="dynamic", set=rejection))
    assert _set(*rejection).engine.speculation.tree.shape == "none"


def test_pipelines_sets_both_bounds() -> None:
    pipelines = config_of(EngineFlags(), ServiceFlags(pipelines=3)).pipelines
    assert (pipelines.min_count, pipelines.max_count) == (3, 3)


def test_a_collector_in_the_environment_is_used_unless_another_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert config_of(EngineFlags()).telemetry.otlp_endpoint == "http://collector:4318"
    config = config_of(EngineFlags(), ServiceFlags(otlp_endpoint="http://other:4318"))
    assert config.telemetry.otlp_endpoint == "http://other:4318"


def test_the_sampler_and_the_protocol_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.01")
    tracing = config_of(EngineFlags()).telemetry_options.tracing
    assert (tracing.endpoint, tracing.protocol) == ("http://traces:4317", "grpc")
    assert (tracing.sampler, tracing.sampler_arg) == ("parentbased_traceidratio", "0.01")
    config = config_of(EngineFlags(set=("telemetry.sampler=always_off",)))
    assert config.telemetry_options.tracing.sampler == "always_off"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1.5")
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_SAMPLER_ARG.*1\.5"):
        config_of(EngineFlags())


@pytest.mark.parametrize(
    "variable",
    [
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "OTEL_TRACES_SAMPLER",
        "OTEL_TRACES_SAMPLER_ARG",
    ],
)
def test_a_value_from_the_environment_that_does_not_fit_is_named_with_its_variable(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "bogus")
    with pytest.raises(ConfigError, match=f"^{variable} in the environment: .*found 'bogus'"):
        config_of(EngineFlags())
    monkeypatch.delenv(variable)
    with pytest.raises(ConfigError, match=r"^telemetry\.sampler: .*found 'wrong'"):
        config_of(EngineFlags(set=("telemetry.sampler=wrong",)))


def test_traces_are_kept_by_default_and_nothing_is_exported() -> None:
    tracing = config_of(EngineFlags()).telemetry_options.tracing
    assert tracing.is_on
    assert not tracing.exports
    off = config_of(EngineFlags(set=("telemetry.max_traces_kept=0",)))
    assert not off.telemetry_options.tracing.is_on


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match=r"x\.yaml: found list, expected a mapping"):
        config_of(EngineFlags(config=file))
    file.write_text("a: [")
    with pytest.raises(ConfigError, match=r"x\.yaml: not YAML"):
        config_of(EngineFlags(config=file))
