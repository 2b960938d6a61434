"""A service's token lies where its user alone can read it, and no longer than the service runs."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from serve_app.service.connection_file import (
    connection_file_for,
    is_silent,
    port_of_the_service,
    prepare_to_connect,
)
from serve_app.service.local_ray import connected_ray


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return tmp_path / "eesd"


@pytest.fixture
def alive() -> Iterator[str]:
    """An address that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead() -> str:
    """An address that no longer accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_connection_file_leads_to_its_service_and_goes_with_it(
    private: Path, alive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection_file_for(8000, address=alive):
        (file,) = private.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of another Ray")
        assert prepare_to_connect(None, port=8000) == alive
        assert os.environ["RAY_AUTH_TOKEN"] == "t0ken"
        with pytest.raises(ConfigError, match="port 8001"):
            prepare_to_connect(None, port=8001)
    assert not private.exists()


def test_two_services_have_a_connection_file_each(private: Path, alive: str) -> None:
    other = alive.replace("127.0.0.1", "localhost")
    with connection_file_for(8000, address=alive):
        with connection_file_for(8001, address=other):
            assert prepare_to_connect(None, port=8000) == alive
            assert prepare_to_connect(None, port=8001) == other
        assert prepare_to_connect(None, port=8000) == alive
        assert len(list(private.iterdir())) == 1


def test_the_only_service_that_runs_is_found_whatever_its_port(
    private: Path, alive: str, dead: str
) -> None:
    with pytest.raises(ConfigError, match="no service of yours runs here"):
        prepare_to_connect(None, port=None)
    with connection_file_for(7999, address=dead), connection_file_for(8931, address=alive):
        assert port_of_the_service() == 8931
        assert prepare_to_connect(None, port=None) == alive
    assert port_of_the_service() is None


def test_several_services_are_listed(private: Path, alive: str) -> None:
    with connection_file_for(8000, address=alive), connection_file_for(8001, address=alive):
        with pytest.raises(ConfigError, match="ports 8000, 8001: name one with --port or --url"):
            port_of_the_service()
        assert prepare_to_connect(None, port=8001) == alive


def test_a_second_service_on_the_port_is_refused_and_the_first_keeps_its_file(
    private: Path, alive: str
) -> None:
    with connection_file_for(8000, address=alive):
        with (
            pytest.raises(ConfigError, match=f"port 8000 runs or is starting.*{alive}"),
            connection_file_for(8000, address="127.0.0.1:1"),
        ):
            pytest.fail("both would be at one port")
        assert prepare_to_connect(None, port=8000) == alive


def test_the_file_of_a_service_that_has_gone_is_replaced(
    private: Path, alive: str, dead: str
) -> None:
    with connection_file_for(8000, address=dead), connection_file_for(8000, address=alive):
        assert prepare_to_connect(None, port=8000) == alive


def test_a_folder_that_others_can_read_gets_no_token(private: Path) -> None:
    private.mkdir(mode=0o755)
    private.chmod(0o755)
    with (
        pytest.raises(ConfigError, match="only you can read"),
        connection_file_for(8000, address="a:1"),
    ):
        pytest.fail("a token was written")
    assert list(private.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/none")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
    with (
        pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR to a folder of yours"),
        connection_file_for(8000, address="127.0.0.1:1"),
    ):
        pass


def test_a_cluster_that_is_named_needs_no_connection_file() -> None:
    assert prepare_to_connect("ray.example:6379", port=8000) == "ray.example:6379"


def test_the_connection_file_of_a_killed_service_is_named_without_a_wait(
    private: Path, dead: str
) -> None:
    began_s = time.perf_counter()
    with connection_file_for(8000, address=dead), pytest.raises(ConfigError) as caught:
        prepare_to_connect(None, port=8000)
    assert "the service on port 8000 is gone" in str(caught.value)
    assert str(private / "service-8000.json") in str(caught.value)
    with pytest.raises(ConfigError, match="nothing accepts connections"):
        connected_ray(dead, shows_logs=False).__enter__()
    assert time.perf_counter() - began_s < 2.0


@pytest.mark.parametrize("address", ["auto", "local", "ray://", "host", "host:no", "[::1"])
def test_what_is_no_host_and_port_is_left_to_ray(address: str) -> None:
    assert not is_silent(address)


@pytest.mark.parametrize("content", ["", "[]", "7", "{}", '{"address": 1, "token": "t"}', "{\xff"])
def test_a_file_that_is_no_connection_file_is_named(
    private: Path, content: str, alive: str
) -> None:
    with connection_file_for(8000, address=alive):
        file = private / "service-8000.json"
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"service-8000\.json.*remove it"):
            prepare_to_connect(None, port=8000)


@pytest.mark.parametrize("planted", ["readable file", "link", "pipe", "readable folder"])
def test_a_connection_file_that_another_user_may_have_planted_is_not_followed(
    private: Path, planted: str, alive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection_file_for(8000, address=alive):
        monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
        file = private / "service-8000.json"
        if planted == "readable file":
            file.chmod(0o644)
        elif planted == "readable folder":
            private.chmod(0o755)
        else:
            file.rename(private / "elsewhere")
            make = os.mkfifo if planted == "pipe" else lambda at, mode: at.symlink_to("elsewhere")
            make(file, 0o644)
        with pytest.raises(ConfigError, match="remove it"):
            prepare_to_connect(None, port=8000)
        assert os.environ["RAY_AUTH_TOKEN"] == "mine"


def test_a_connection_file_of_another_user_is_not_followed(
    alive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection_file_for(8000, address=alive):
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        with pytest.raises(ConfigError, match="only you can read"):
            prepare_to_connect(None, port=8000)
