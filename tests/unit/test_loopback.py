"""Loopback is reached directly, whatever proxies the environment names."""

import pytest

from eesd_dist.loopback import bypass_proxies


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")


def _after(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, str]:
    import os

    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    bypass_proxies()
    bypass_proxies()
    return {name: os.environ[name] for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy")}


def test_hosts_that_the_user_excludes_stay_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = "a.example,b.example,localhost,127.0.0.1,::1"
    environment = _after(monkeypatch, no_proxy="a.example", NO_PROXY="b.example, localhost")
    assert environment == {"no_proxy": hosts, "NO_PROXY": hosts, "no_grpc_proxy": ""}


def test_grpcs_own_list_gets_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = _after(monkeypatch, no_grpc_proxy="a.example")
    assert environment["no_grpc_proxy"] == "a.example,localhost,127.0.0.1,::1"


def test_no_proxy_at_all_stays_no_proxy_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _after(monkeypatch, NO_PROXY="*")["no_proxy"] == "*"
