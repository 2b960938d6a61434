"""How what breaks in a collecting worker is told."""

from pathlib import Path

import pytest

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.distill.collect import CollectOptions, CollectRequest
from eesd_dist.distill.collector import Chunk, ShardJob
from serve_app.distill.jobs import ChunkWorker, cause_of


def test_a_worker_that_cannot_write_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CollectOptions(model=BUNDLED_MODEL)
    job = ShardJob(
        model=BUNDLED_MODEL,
        folder=tmp_path,
        recipe=CollectRequest(options=options, out=tmp_path).recipe(),
        batch=1,
        threads=1,
        workers=None,
        allowed_s=60.0,
    )
    worker = ChunkWorker(job)

    def full(chunk: Chunk) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "shard"))

    monkeypatch.setattr(worker._worker, "make", full)
    reply = worker.answer(Chunk(index=0, sources=()).to_json())
    assert reply == {"config_error": f"{tmp_path}/shard: No space left on device"}


def test_a_broken_workers_own_words_are_told_without_colours() -> None:
    message = (
        "\x1b[36mray::map()\x1b[39m (pid=1)\n  File x.py\n\x1b[31mMemoryError: too much\x1b[0m\n"
    )
    assert cause_of(RuntimeError(message)) == "ray::map() (pid=1): MemoryError: too much"
    assert cause_of(RuntimeError("gone")) == "gone"
    assert cause_of(RuntimeError()) == "RuntimeError"
