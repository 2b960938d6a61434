"""What `eesd serve` looks at before it starts a service, and what it says when one is there."""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray.serve import Application
from ray.serve.config import ProxyLocation

from cluster.ray_compat import ServeStatus
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.errors import ConfigError
from eesd_dist.workers.messages import PlacementMode
from serve_app.config import ServiceConfig, require_key, service_config
from serve_app.service import serving
from serve_app.service.serve_instance import require_place, url_of
from serve_app.service.start_line import StartLine


def _config(host: str = "127.0.0.1", port: int = 8000) -> ServiceConfig:
    return service_config(
        {"engine": {"model": {"path": str(BUNDLED_MODEL)}}, "host": host, "port": port}
    )


@contextmanager
def _listener(host: str) -> Iterator[int]:
    """A port that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_is_tried_here_only_where_serve_will_listen_here(host: str, shown: str) -> None:
    with _listener(host) as port:
        config = _config(host, port)
        # The head of a cluster may be another host, or its Serve may already listen.
        serving._check_early(config, is_ours=False)
        with pytest.raises(ConfigError) as refusal:
            serving._check_early(config, is_ours=True)
        assert f"cannot listen on {shown}:{port}: Address already in use" in str(refusal.value)
    serving._check_early(config, is_ours=True)


def _running(
    host: str = "127.0.0.1",
    *,
    location: ProxyLocation = ProxyLocation.HeadOnly,
    routes: Mapping[str, str | None] | None = None,
) -> ServeStatus:
    return ServeStatus(
        host=host, port=8000, has_tls=False, proxy_location=location, route_prefixes=routes or {}
    )


def test_a_serve_that_listens_at_another_address_is_not_asked_to_serve() -> None:
    require_place(_config("0.0.0.0", 8000), _running("0.0.0.0"), updates=True)
    expected = r"listens on 0\.0\.0\.0:8000, expected \[::1\]:8001: give --host 0\.0\.0\.0 --port"
    with pytest.raises(ConfigError, match=expected):
        require_place(_config("::1", 8001), _running("0.0.0.0"), updates=True)


def test_other_hosts_are_not_served_without_a_key_unless_this_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EESD_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "10.0.0.7", "gpu-1"):
        with pytest.raises(ConfigError, match=r"set EESD_API_KEY .* or give --allow-no-key"):
            serving._check_early(_config(host), is_ours=False)
        require_key(_config(host), has_key=True)
        require_key(_config(host).model_copy(update={"allow_no_key": True}), has_key=False)
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        require_key(_config(host), has_key=False)


def test_a_wrong_file_of_keys_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.yaml"
    config = _config().model_copy(update={"keys_file": file})
    monkeypatch.delenv("EESD_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"keys_file is .*, and EESD_API_KEY is not set"):
        serving._check_early(config, is_ours=False)
    monkeypatch.setenv("EESD_API_KEY", "s3cret")
    with pytest.raises(ConfigError, match=r"keys\.yaml: No such file"):
        serving._check_early(config, is_ours=False)
    file.write_text("keys: 3")
    with pytest.raises(ConfigError, match=r"keys\.yaml: keys: Input should be a valid tuple"):
        serving._check_early(config, is_ours=False)
    file.write_text("keys: []")
    serving._check_early(config, is_ours=False)


def test_a_serve_without_http_is_not_asked_to_serve() -> None:
    with pytest.raises(ConfigError, match=r"runs in this cluster without HTTP"):
        require_place(_config(), _running(location=ProxyLocation.Disabled), updates=True)


@pytest.mark.parametrize("updates", [False, True])
def test_no_application_of_another_kind_is_replaced(updates: bool) -> None:
    require_place(_config(), _running(routes={"mine": "/mine", "inner": None}), updates=updates)
    for others in ({"eesd": "/elsewhere"}, {"another": "/"}):
        with pytest.raises(ConfigError, match=rf"has application '{next(iter(others))}' at /"):
            require_place(_config(), _running(routes=others), updates=updates)


def test_a_service_is_replaced_only_where_that_is_an_update() -> None:
    running = _running(routes={"eesd": "/"})
    require_place(_config(), running, updates=True)
    with pytest.raises(ConfigError, match="has application 'eesd' at /"):
        require_place(_config(), running, updates=False)


def test_the_key_of_the_starting_process_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed: list[Application] = []
    monkeypatch.setattr(serving, "deploy", lambda application, **_: deployed.append(application))
    for key in ("s3cret", ""):
        monkeypatch.setenv("EESD_API_KEY", key)
        with serving._hidden_key(_config()) as api_key:
            assert "EESD_API_KEY" not in os.environ, "processes that are started would inherit it"
            serving._bring_up(_config(), serving.Stopping(), api_key=api_key, line=StartLine(print))
        assert os.environ["EESD_API_KEY"] == key
    with_key, without = [application._bound_deployment.init_args[-1] for application in deployed]
    assert with_key.get_secret_value() == "s3cret"
    assert without is None


@contextmanager
def _handlers_restored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_and_a_second_interrupt_has_its_default_effect(
    number: signal.Signals,
) -> None:
    stopping = serving.Stopping()
    with _handlers_restored():
        stopping.listen()
        assert not stopping.wait(0.01)
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        assert stopping.wait(60.0)
        assert stopping.is_set()
        assert stopping.wait(60.0), "it is set for good"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_at_any_step_of_a_wait_is_noticed() -> None:
    """A lock that both the wait and the handler take would block this thread for ever."""
    num_noticed = 0
    with _handlers_restored():
        signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
        for _ in range(20_000):
            stopping = serving.Stopping()
            signal.signal(signal.SIGALRM, stopping._stop)
            num_noticed += stopping.wait(1e-6)
    assert num_noticed > 100


def test_the_welcome_has_an_address_and_a_request_that_work() -> None:
    welcome = _welcome(_config("::1"), has_key=False)
    assert "on http://[::1]:8000\n" in welcome
    assert "curl http://[::1]:8000/v1/chat/completions -H 'Content-Type: application/json' -d" in (
        welcome
    )
    welcome = _welcome(_config(), has_key=True)
    assert '-H "Authorization: Bearer $EESD_API_KEY"' in welcome
    assert "(a drafting actor and 1 verify rank; Ctrl-C stops them)" in welcome
    welcome = _welcome(_config(), has_key=True, mode="shared")
    assert "(a drafting actor with verify rank 0; Ctrl-C stops them)" in welcome


def _welcome(config: ServiceConfig, *, has_key: bool, mode: PlacementMode = "dedicated") -> str:
    return serving._welcome(
        config,
        mode,
        where=url_of(config),
        url=url_of(config),
        has_key=has_key,
        began_s=0.0,
        end="Ctrl-C stops them",
    )


def test_the_command_that_stops_a_service_names_what_is_not_the_default() -> None:
    assert serving._stop_command(_config(), "h:1") == "`eesd stop --address h:1`"
    names = {"app_name": "b", "router": {"name": "r", "namespace": "n"}}
    config = service_config({"engine": {"model": {"path": str(BUNDLED_MODEL)}}, **names})
    flags = "--app b --router r --namespace n"
    assert serving._stop_command(config, "h:1") == f"`eesd stop --address h:1 {flags}`"
