"""Files of API keys: what they may say, and how a change is taken over."""

import hashlib
import os
from pathlib import Path

import pytest
import yaml

from eesd_dist.errors import ConfigError
from serve_app.config import require_key, service_config
from serve_app.openai.keys import KeyRing, find_key, operators_key, read_keys

SECRET = "sk-of-search-0123456789"


def sum_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def entry(name: str = "search", secret: str = SECRET, **fields: object) -> dict[str, object]:
    return {"name": name, "sha256": sum_of(secret), **fields}


def write(file: Path, *entries: dict[str, object]) -> Path:
    file.write_text(yaml.safe_dump({"keys": list(entries)}))
    return file


def test_a_key_is_found_by_its_sum(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.yaml", entry(weight=2, priority=1), entry("chat", "other"))
    keys = read_keys(file)
    key = find_key(keys, SECRET.encode())
    assert key is not None
    assert (key.name, key.weight, key.priority, key.operator) == ("search", 2.0, 1, False)
    assert not key.has_limits
    for wrong in ("", "Other", sum_of(SECRET), SECRET + " "):
        assert find_key(keys, wrong.encode()) is None
    assert find_key(keys, b"\xff") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: [", "not YAML"),
        ("keys: 2026-13-45", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("[]", "file"),
        ("keys: {}", "keys: Input should be a valid tuple"),
        (yaml.safe_dump({"keys": [entry(color="red")]}), "keys.0.color: Extra inputs"),
        (yaml.safe_dump({"keys": [entry(weight=0)]}), "keys.0.weight: Input should be greater"),
        (yaml.safe_dump({"keys": [entry("a b")]}), "keys.0.name: String should match"),
        (yaml.safe_dump({"keys": [{"name": "a", "sha256": SECRET}]}), "keys.0.sha256"),
        (yaml.safe_dump({"keys": [entry(), entry("b")]}), "the same sha256"),
        (
            yaml.safe_dump({"keys": [entry(), entry(secret="b", weight=2)]}),
            "keys named 'search' differ in their limits",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_quoting_keys(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.yaml") as caught:
        read_keys(file)
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)
    assert sum_of(SECRET) not in str(caught.value)


def test_a_missing_file_and_a_large_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none")
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="more than"):
        read_keys(tmp_path / "large")


def test_two_keys_may_share_a_name(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", entry(weight=2), entry(secret="next", weight=2))
    assert {key.name for key in read_keys(file)} == {"search"}


def test_a_changed_file_is_taken_over(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", entry())
    ring = KeyRing(operators_key("root"), file=file)
    operators = ring.find(b"root")
    assert operators is not None
    assert operators.operator
    assert ring.find(SECRET.encode()) is not None
    write(tmp_path / "new", entry("chat", "other-secret"))
    os.replace(tmp_path / "new", file)  # as Kubernetes does with a mounted secret
    ring.reread()
    assert ring.find(SECRET.encode()) is None
    assert ring.find(b"other-secret") is not None
    assert ring.find(b"root") is not None


def test_a_wrong_file_changes_nothing_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "keys", entry())
    ring = KeyRing(operators_key("root"), file=file)
    file.write_text("keys: 3")
    ring.reread()
    ring.reread()
    assert ring.find(SECRET.encode()) is not None
    assert "keys: Input should be a valid tuple" in ring.refused
    assert sum("keys stay as they were" in record.message for record in caplog.records) == 1
    file.unlink()
    ring.reread()
    assert "No such file" in ring.refused
    write(file, entry(weight=3))
    ring.reread()
    key = ring.find(SECRET.encode())
    assert key is not None
    assert (key.weight, ring.refused) == (3.0, "")


def test_a_file_that_is_wrong_from_the_start_leaves_the_operators_key_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("keys: 3")
    with pytest.raises(ConfigError, match="keys: Input should be a valid tuple"):
        KeyRing(operators_key("root"), file=file)
    ring = KeyRing(operators_key("root"), file=file, must_be_right=False)
    ring.reread()
    assert (ring.is_complete, ring.find(SECRET.encode())) == (False, None)
    assert ring.find(b"root") is not None
    assert "keys: Input should be a valid tuple" in ring.refused
    messages = [r.getMessage() for r in caplog.records if "until this is mended" in r.getMessage()]
    assert len(messages) == 1
    write(file, entry())
    ring.reread()
    assert (ring.is_complete, ring.refused) == (True, "")
    assert ring.find(SECRET.encode()) is not None
    file.write_text("keys: 3")
    ring.reread()
    assert ring.is_complete, "those of before hold"
    assert ring.find(SECRET.encode()) is not None


def test_a_change_that_could_not_be_read_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "keys", entry())
    ring = KeyRing(operators_key("root"), file=file)
    write(file, entry("chat", "other-secret"))
    with monkeypatch.context() as broken:

        def fails(_: Path) -> str:
            raise OSError(116, "Stale file handle")

        broken.setattr(Path, "read_text", fails)
        ring.reread()
    assert "Stale file handle" in ring.refused
    ring.reread()
    assert (ring.refused, ring.find(SECRET.encode())) == ("", None)


def test_the_operators_key_is_not_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", entry(secret="root"))
    with pytest.raises(ConfigError, match="operators' key"):
        KeyRing(operators_key("root"), file=file)
    file = write(tmp_path / "keys", entry("operator"))
    with pytest.raises(ConfigError, match="operators' key"):
        KeyRing(operators_key("root"), file=file)


def test_a_file_of_keys_needs_the_operators_key(tmp_path: Path) -> None:
    config = service_config(
        {"engine": {"model": {"path": str(tmp_path)}}, "keys_file": str(tmp_path / "keys")}
    )
    with pytest.raises(ConfigError, match="EESD_API_KEY is not set"):
        require_key(config, has_key=False)
    require_key(config, has_key=True)
