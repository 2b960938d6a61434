"""A service's token lies where its user alone can read it, and no longer than the service runs."""

import os
import stat
from pathlib import Path

import pytest

from eesd_dist.errors import ConfigError
from serve_app._passes import pass_for, prepare_to_join


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return tmp_path / "eesd"


def test_a_pass_leads_to_its_service_and_goes_with_it(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pass_for(8000, address="1.2.3.4:5"):
        (file,) = private.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of another Ray")
        assert prepare_to_join(None, port=8000) == "1.2.3.4:5"
        assert os.environ["RAY_AUTH_TOKEN"] == "t0ken"
        with pytest.raises(ConfigError, match="port 8001"):
            prepare_to_join(None, port=8001)
    assert not private.exists()


def test_two_services_have_a_pass_each(private: Path) -> None:
    with pass_for(8000, address="a:1"):
        with pass_for(8001, address="b:1"):
            assert prepare_to_join(None, port=8000) == "a:1"
            assert prepare_to_join(None, port=8001) == "b:1"
        assert prepare_to_join(None, port=8000) == "a:1"
        assert len(list(private.iterdir())) == 1


def test_a_folder_that_others_can_read_gets_no_token(private: Path) -> None:
    private.mkdir(mode=0o755)
    private.chmod(0o755)
    with pytest.raises(ConfigError, match="only you can read"), pass_for(8000, address="a:1"):
        pytest.fail("a token was written")
    assert list(private.iterdir()) == []


def test_a_cluster_that_is_named_needs_no_pass() -> None:
    assert prepare_to_join("ray.example:6379", port=8000) == "ray.example:6379"
