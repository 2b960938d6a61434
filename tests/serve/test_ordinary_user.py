"""A user without privileges, without a home folder and without an entry in the table of users
serves."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eesd_dist.config import EngineConfig
from eesd_dist.engine.local import LocalEngine
from eesd_dist.text import Tokenizer
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams
from eesd_dist.user_folders import cache_folder
from tests.support.kept_kernels import copy_kept
from tests.support.ordinary_user import UID
from tests.support.running import free_port
from tests.support.served import command, wait_for_line
from tests.support.tiny_service import write_tiny_service

USER = UID if os.getuid() == 0 else os.getuid()
PROMPT = "the quick brown fox"


@pytest.fixture
def folder() -> Iterator[Path]:
    """The temporary folder of that user, the only one that it can write in, with the kernels that
    earlier tests have compiled."""
    with tempfile.TemporaryDirectory(prefix="user-", dir="/tmp") as name:
        private = Path(name, f"eesd-{USER}")
        private.mkdir(mode=0o700)
        if (kernels := cache_folder() / "kernels").exists():
            copy_kept(kernels, private / "cache" / "kernels")
        for path in (Path(name), *Path(name).rglob("*")):
            os.chown(path, USER, -1)
        yield Path(name)


def test_an_ordinary_user_without_a_home_folder_serves_the_text_of_plain_decoding(
    folder: Path,
) -> None:
    model = write_tiny_service(folder / "model")
    port = free_port()
    words = ("serve", "--model", str(model), "--name", "tiny", "--port", str(port))
    with command(*words, env={"TMPDIR": str(folder)}, is_ordinary=True) as (process, lines):
        wait_for_line(lines, "Ctrl-C stops", process)
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "seed": 11}
        url = f"http://127.0.0.1:{port}/v1/completions"
        extra = {"temperature": 0.8, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(url, json=body | extra, timeout=60).raise_for_status().json()
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0, "".join(lines)
    assert "Traceback" not in "".join(lines)
    assert answer["choices"][0]["token_ids"] == _plain(model)
    logs = folder / f"eesd-{USER}"
    assert set(folder.iterdir()) == {logs, model}
    assert list(logs.glob("state/logs/*/ray/worker-*")), "the logs are kept"


def _plain(model: Path) -> list[int]:
    config = EngineConfig.model_validate({"model": {"path": str(model)}})
    plain = Request(
        request_id=RequestId("plain"),
        prompt=Tokenizer.load(model).encode(PROMPT),
        sampling=SamplingParams(max_tokens=48, seed=11, temperature=0.8),
        speculation=SpeculationParams(mode="off"),
    )
    return list(LocalEngine(config).generate([plain])[0].tokens)
