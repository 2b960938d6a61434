"""The files of the web pages: headers, no key, nothing from outside, all of them in a wheel."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from serve_app.openai.console.pages import PATHS
from serve_app.openai.middleware.gate import OPEN_PATHS
from tests.support.live_server import serving
from tests.support.toy_api import toy_api
from tests.support.toy_engine import ToyEngine

ROOT = Path(__file__).parents[4]
STATIC = ROOT / "serve_app" / "openai" / "console" / "static"
FILES = sorted(path for path in PATHS if not path.endswith("/"))


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = toy_api(ToyEngine(), max_model_len=100, api_key="k")
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", FILES)
def test_a_file_needs_no_key_and_is_sent_once(path: str, http: httpx.Client) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.content
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; connect-src 'self'; ")
    assert "frame-ancestors 'none'" in policy
    assert ("require-trusted-types-for 'script'" in policy) == (path != "/docs")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    revalidated = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (revalidated.status_code, revalidated.content) == (304, b"")
    assert revalidated.headers["etag"] == answer.headers["etag"]
    assert http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    head = http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == answer.headers["content-length"]


def test_a_page_is_all_that_is_had_without_a_key(http: httpx.Client) -> None:
    assert PATHS <= OPEN_PATHS
    for path in ("/console/other.js", "/console/../v1/models", "/openapi.json", "/redoc"):
        assert http.get(path).status_code == 401, path
    for path in ("/console/", "/"):
        answer = http.get(path)
        assert answer.next_request is not None
        assert (answer.status_code, answer.next_request.url.path) == (307, "/console")
    with_key = {"Authorization": "Bearer k"}
    assert http.get("/redoc", headers=with_key).status_code == 404, "it loads from other hosts"
    assert http.post("/console", headers=with_key).status_code == 405


def test_the_pages_name_no_other_host_and_have_no_script_or_style_in_them() -> None:
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        if file.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", text)
            for name in re.findall(r'(?:src|href)="((?:console|docs)/[^"]+)"', text):
                assert f"/{name}" in PATHS


def test_a_wheel_has_every_file_that_is_served(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "serve_app", source / "serve_app", ignore=ignored)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)),
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(ZipFile(wheel).namelist())
    assert {f"serve_app/openai/console/static/{file.name}" for file in STATIC.iterdir()} <= packed
