"""Which requests may find each other's prefixes: those of one API key and one `cache_salt`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.openai.keys import KeyRing, operators_key
from tests.support.event_stream import WITH_IDS, parsed
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine
from tests.unit.serve_app.openai.test_keys import entry, write

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["abc", "abd"], "n": 3, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}


class Site:
    """An API with the keys `alice` and `bob`, or without keys."""

    def __init__(self, url: str, engine: ToyEngine) -> None:
        self._url = url
        self.engine = engine

    def post(
        self, name: str, path: str = "/v1/completions", *, event_id: str = "", **fields: Any
    ) -> httpx.Response:
        id_headers = {"Last-Event-ID": event_id} if event_id else WITH_IDS
        headers = {"Authorization": f"Bearer secret of {name}", **id_headers}
        body = {**BODIES[path], **fields}
        return httpx.post(self._url + path, json=body, headers=headers, timeout=20)

    def salts(self, name: str, path: str = "/v1/completions", **fields: Any) -> set[str]:
        """Returns the salts of the requests that the engine gets."""
        self.engine.requests.clear()
        answer = self.post(name, path, **fields)
        assert answer.status_code == 200, answer.text
        return {request.cache_salt for request in self.engine.requests}


@contextmanager
def _site(folder: Path, *, keys: bool = True, **options: Any) -> Iterator[Site]:
    engine = ToyEngine(vocab_size=128)
    if keys:
        entries = [entry(name, f"secret of {name}") for name in ("alice", "bob")]
        ring = KeyRing(operators_key("root"), file=write(folder / "keys.yaml", *entries))
        options |= {"api_key": "root", "keys": ring}
    with serving(toy_api(engine, max_model_len=100, **options)) as url:
        yield Site(url, engine)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with _site(tmp_path) as site:
        yield site


@pytest.mark.parametrize("path", BODIES)
def test_all_texts_of_a_request_have_the_salt_of_its_key_and_its_own(site: Site, path: str) -> None:
    alice, bob = site.salts("alice", path), site.salts("bob", path)
    secret = site.salts("alice", path, cache_salt="s")
    others = site.salts("bob", path, cache_salt="s"), site.salts("alice", path, cache_salt="t")
    assert site.salts("alice", path) == alice
    assert site.salts("alice", path, cache_salt="s") == secret
    assert site.salts("alice", path, cache_salt=None) == alice
    salt_sets = [alice, bob, secret, *others]
    assert all(len(salts) == 1 for salts in salt_sets)
    assert len(set.union(*salt_sets)) == len(salt_sets)


@pytest.mark.parametrize("salt", ["", "s" * 257, 7, ["s"], {"s": 1}, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_salt_is_a_text_that_is_not_empty_and_not_long(
    site: Site, path: str, salt: object
) -> None:
    response = site.post("alice", path, cache_salt=salt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"
    assert not site.engine.requests


def test_the_longest_salt_and_one_that_would_be_the_name_of_another_key_are_taken(
    site: Site,
) -> None:
    assert len(*site.salts("alice", cache_salt="s" * 256)) > 256
    assert site.salts("alice", cache_salt="\nbob\n") != site.salts("bob")
    assert site.salts("alice", cache_salt="é\ud7ff🦊") != site.salts("alice")


def test_a_resumed_stream_has_its_salt_and_its_id_belongs_to_no_other(site: Site) -> None:
    body = {"stream": True, "cache_salt": "s", "max_tokens": 8}
    whole = parsed(site.post("alice", **body).text)
    event_id = next(event.id for event in whole if event.id)
    before = {request.cache_salt for request in site.engine.requests}
    site.engine.requests.clear()
    assert site.post("alice", event_id=event_id, **body).status_code == 200
    assert {request.cache_salt for request in site.engine.requests} == before
    other = {**body, "cache_salt": "t"}
    assert site.post("alice", event_id=event_id, **other).status_code == 400


def test_where_prefixes_are_shared_only_a_requests_own_salt_counts(tmp_path: Path) -> None:
    with _site(tmp_path, share_prefix_cache=True) as site:
        assert site.salts("alice") == site.salts("bob")
        assert site.salts("alice", cache_salt="s") == site.salts("bob", cache_salt="s")
        assert site.salts("alice", cache_salt="s") != site.salts("alice")


def test_without_keys_all_callers_share_one_cache_and_may_salt_it(tmp_path: Path) -> None:
    with _site(tmp_path, keys=False) as site:
        assert site.salts("alice") == site.salts("bob")
        assert site.salts("alice", cache_salt="s") != site.salts("bob")


def test_a_salt_shows_itself_in_no_text_about_a_request(site: Site) -> None:
    site.salts("alice", cache_salt="hunter2")
    assert "hunter2" not in repr(site.engine.requests)
