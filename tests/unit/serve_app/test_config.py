"""What a service's configuration takes, and what it says of what it does not take."""

from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from serve_app.config import LimitsConfig, LiveConfig, ServiceConfig, live_config, service_config


def _config(**sections: object) -> ServiceConfig:
    return service_config({"engine": {"model": {"path": "/model"}}, **sections})


def test_a_pipeline_is_not_forgotten_between_two_heartbeats() -> None:
    with pytest.raises(ConfigError, match=r"expiry_s is 5 and heartbeat_s is 30.*to 90 or more"):
        _config(router={"heartbeat_s": 30, "expiry_s": 5})
    with pytest.raises(ConfigError, match=r"heartbeat_s to 1\.66667 or less"):
        _config(router={"heartbeat_s": 2})
    with pytest.raises(ConfigError, match=r"router\.expiry_s: Input should be greater"):
        _config(router={"heartbeat_s": 0.01, "expiry_s": 0.4})
    router = _config(router={"heartbeat_s": 2, "expiry_s": 6}).router
    assert (router.heartbeat_s, router.expiry_s) == (2, 6)


@pytest.mark.parametrize("port", [0, 70_000])
def test_a_port_is_one_that_can_be_listened_on(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"port: Input should be .*, found {port}"):
        _config(port=port)


def test_a_tilde_is_the_home_of_the_user_that_writes_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/of-mine")
    config = _config(
        engine={"model": {"path": "~/model", "head": "~/head"}},
        router={"checkpoint": "~/beliefs.json", "priors": "~/priors.json"},
        recorder={"folder": "~/recorder"},
        telemetry={"trace_folder": "~/traces"},
    )
    home = Path("/home/of-mine")
    assert (config.engine.model.path, config.engine.model.head) == (home / "model", home / "head")
    assert config.router.checkpoint == home / "beliefs.json"
    assert config.router.priors == home / "priors.json"
    assert config.recorder.folder == home / "recorder"
    assert config.telemetry.trace_folder == home / "traces"


def test_the_home_of_an_unknown_user_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"recorder\.folder: .*~no-such-user/x: .*write the folder"
    ):
        _config(recorder={"folder": "~no-such-user/x"})


def test_a_controller_that_does_not_exist_is_refused_with_the_names_of_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"controller is 'magic', expected one of fixed, .*spec"):
        _config(engine={"model": {"path": "/m"}, "speculation": {"controller": "magic"}})


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"prt": 5}, "prt: unknown key, found 5; did you mean port?"),
        (
            {"placement": {"draft": {"nope": 1}}},
            "placement.draft.nope: unknown key, found 1; known: num_cpus, num_gpus, resources, "
            "labels, strategy",
        ),
        (
            {"port": {"x": 1}},
            "port: Input should be a valid integer, found {'x': 1}: this key takes a value, set it "
            "without a key below it",
        ),
        (
            {"port": "x", "prt": 5},
            "port: Input should be a valid integer, unable to parse string as an integer, found "
            "'x' (and 1 more)",
        ),
        ({"router": 3}, "router: Input should be a valid dictionary or instance of RouterConfig"),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_found_and_what_to_do(
    tree: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        _config(**tree)
    assert str(error.value).startswith(complaint)


def test_a_stream_waits_for_a_few_starts_of_a_pipeline_unless_it_is_told_how_long() -> None:
    measured = _config().recovery
    assert measured.pause_for(None) == measured.pause_for(2.0) == 60.0, "at least a minute"
    assert measured.pause_for(100.0) == 300.0
    configured = _config(recovery={"stream_pause_s": 5}).recovery
    assert configured.pause_for(None) == configured.pause_for(100.0) == 5.0


@pytest.mark.parametrize("seconds", [-1, 3601, float("inf")])
def test_streams_are_kept_for_an_hour_at_most_and_need_not_be(seconds: float) -> None:
    assert _config(recovery={"resume_window_s": 0}).recovery.resume_window_s == 0.0
    with pytest.raises(ConfigError, match=r"recovery\.resume_window_s"):
        _config(recovery={"resume_window_s": seconds})


@pytest.mark.parametrize("key", ["stream_pause_s", "lease_s", "max_interruptions", "suspect_after"])
def test_what_recovery_waits_for_and_counts_is_more_than_nothing(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"recovery\.{key}: Input should be greater than 0"):
        _config(recovery={key: 0})


def test_a_user_config_is_checked_like_a_configuration() -> None:
    assert live_config(None) == LiveConfig()
    live = live_config({"limits": {"max_choices": 3}, "log_level": "DEBUG"})
    assert live.limits == LimitsConfig(max_choices=3)
    with pytest.raises(ConfigError, match=r"user_config: log_level: .*found 'LOUD'"):
        live_config({"log_level": "LOUD"})
    with pytest.raises(ConfigError, match=r"user_config: limit: .*did you mean limits"):
        live_config({"limit": {}})
    with pytest.raises(ConfigError, match=r"user_config: limits\.max_choice: .*max_choices"):
        live_config({"limits": {"max_choice": 3}})
    with pytest.raises(ConfigError, match="user_config"):
        live_config([])
