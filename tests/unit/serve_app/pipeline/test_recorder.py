"""The recorder's folder is bounded, intact after any failure, and never delays a round."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eesd_dist.distill.features import FeatureManifest, FeatureStore, identity_of
from eesd_dist.engine.recording.recorder import VerifiedPiece
from eesd_dist.errors import ConfigError
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from eesd_dist.workers.stage_factory import EngineStages
from serve_app.config import service_config
from serve_app.pipeline import recorder as recorder_module
from serve_app.pipeline.recorder import RecorderFolder, new_manifest
from serve_app.pipeline.stage_factory import OpenRecorder, stages_of
from tests.support.drafters import EXIT_LAYER, save_head, save_target
from tests.support.running import until

TOP_K = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_target(tmp_path_factory.mktemp("target"))
    save_head(folder, folder / "exit_head", "sometimes")
    return folder


@pytest.fixture(scope="module")
def empty(target: Path) -> FeatureManifest:
    config = service_config({"engine": {"model": {"path": str(target), "device": "cpu"}}})
    return new_manifest(config.engine, top_k=TOP_K)


def piece(seed: int, length: int = 40, *, width: int) -> VerifiedPiece:
    rng = np.random.default_rng(seed)
    return VerifiedPiece(
        tokens_T=rng.integers(0, 96, length, dtype=np.int32),
        num_prompt=1 + seed % 3,
        hidden_TD=torch.randn(length, width, generator=torch.Generator().manual_seed(seed)),
        top_ids_TK=rng.integers(0, 96, (length, TOP_K), dtype=np.int32),
        top_logprobs_TK=-np.sort(rng.random((length, TOP_K), dtype=np.float32)),
        workload=f"class {seed}",
        temperature=0.5,
    )


def opened(folder: Path, empty: FeatureManifest, **how: Any) -> RecorderFolder:
    return RecorderFolder(folder, empty, **{"max_bytes": 2**20, "sample_rate": 1.0, **how})


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*"))


def test_what_is_put_is_what_a_feature_store_reads(
    tmp_path: Path, target: Path, empty: FeatureManifest
) -> None:
    recorder = opened(tmp_path, empty)
    width = empty.verifier.hidden_size
    put = [piece(seed, width=width) for seed in range(5)]
    for segment in put:
        recorder.put(segment)
    recorder.flush()
    store = FeatureStore.open(tmp_path, expect=identity_of(target))
    assert store.manifest.exits == (EXIT_LAYER,)
    read = list(store.sequences())
    assert [s.tokens_T.tolist() for s in read] == [p.tokens_T.tolist() for p in put]
    for sequence, segment in zip(read, put, strict=True):
        assert torch.equal(sequence.hidden[EXIT_LAYER], segment.hidden_TD.bfloat16())
        assert sequence.top_ids_TK.tolist() == segment.top_ids_TK.tolist()
        torch.testing.assert_close(
            sequence.top_logits_TK - sequence.lse_T[:, None],
            torch.from_numpy(segment.top_logprobs_TK),
            atol=1e-3,
            rtol=1e-3,
        )
        assert (sequence.workload, sequence.temperature) == (segment.workload, 0.5)
    counts = recorder.counts()
    assert (counts.num_written, counts.num_dropped) == (5, 0)
    assert counts.num_bytes == sum(file.stat().st_size for file in shards(tmp_path))


def test_no_other_user_can_read_a_recording(tmp_path: Path, empty: FeatureManifest) -> None:
    before = os.umask(0o022)
    try:
        recorder = opened(tmp_path / "recorder", empty)
        recorder.put(piece(1, width=empty.verifier.hidden_size))
        recorder.flush()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "recorder").stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in shards(tmp_path / "recorder")] == [0o600]


def test_the_oldest_shard_goes_first_and_the_bound_holds_at_every_moment(
    tmp_path: Path, empty: FeatureManifest
) -> None:
    bound = 60_000
    recorder = opened(tmp_path, empty, max_bytes=bound)
    width = empty.verifier.hidden_size
    for seed in range(30):
        recorder.put(piece(seed, width=width))
        recorder.flush()
        assert sum(file.stat().st_size for file in shards(tmp_path)) <= bound
    workloads = [s.workload for s in FeatureStore.open(tmp_path, expect=None).sequences()]
    assert 1 < len(workloads) < 30
    assert workloads == [f"class {seed}" for seed in range(30 - len(workloads), 30)]
    assert recorder.counts().num_written == 30


def test_a_slow_disk_costs_texts_and_no_time(
    tmp_path: Path, empty: FeatureManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> None:
        time.sleep(5.0)
        raise OSError(errno.EIO, "a disk that thinks for long")

    monkeypatch.setattr(recorder_module, "write_shard", slow)
    monkeypatch.setattr(recorder_module, "_MAX_WAITING_BYTES", 40_000)
    recorder = opened(tmp_path, empty)
    put = [piece(seed, width=empty.verifier.hidden_size) for seed in range(200)]
    began_s = time.perf_counter()
    for segment in put:
        recorder.put(segment)
    assert time.perf_counter() - began_s < 2.5
    assert recorder.counts().num_dropped > 150


def test_a_full_disk_is_counted_and_forgotten_once_there_is_room(
    tmp_path: Path, empty: FeatureManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recorder = opened(tmp_path, empty)
    width = empty.verifier.hidden_size
    with monkeypatch.context() as patched:
        patched.setattr(recorder_module, "write_shard", full)
        recorder.put(piece(1, width=width))
        recorder.flush()
    assert recorder.counts().num_dropped == 1
    recorder.put(piece(2, width=width))
    recorder.flush()
    assert [s.workload for s in FeatureStore.open(tmp_path, expect=None).sequences()] == ["class 2"]


def test_two_writers_share_a_folder(tmp_path: Path, empty: FeatureManifest) -> None:
    writers = [opened(tmp_path, empty) for _ in range(2)]
    for seed in range(10):
        writers[seed % 2].put(piece(seed, width=empty.verifier.hidden_size))
        if seed % 3 == 0:
            writers[0].flush()
    for writer in writers:
        writer.flush()
    workloads = {s.workload for s in FeatureStore.open(tmp_path, expect=None).sequences()}
    assert workloads == {f"class {seed}" for seed in range(10)}


_WRITER = """
import sys
from pathlib import Path
from eesd_dist.distill.features import FeatureManifest
from tests.unit.serve_app.pipeline.test_recorder import opened, piece
from dataclasses import replace
folder = Path(sys.argv[1])
empty = replace(FeatureManifest.read(folder), shards=())
recorder = opened(folder, empty, max_bytes=200_000)
for seed in range(10_000):
    recorder.put(piece(seed, 100, width=empty.verifier.hidden_size))
    recorder.flush()
    print(seed, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_store_and_the_next_one_clears_up(
    tmp_path: Path, empty: FeatureManifest
) -> None:
    empty.write(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for _ in range(12):
        assert child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert list(FeatureStore.open(tmp_path, expect=None).sequences())
    (tmp_path / "shard-09999.safetensors").write_bytes(b"an orphan")
    (tmp_path / ".shard-00001.safetensors.77.partial").write_bytes(b"half")
    recorder = opened(tmp_path, empty, max_bytes=200_000)
    recorder.put(piece(77, width=empty.verifier.hidden_size))
    recorder.flush()
    store = FeatureStore.open(tmp_path, expect=None)
    assert [s.workload for s in store.sequences()][-1] == "class 77"
    names = {shard.name for shard in store.manifest.shards}
    assert {file.name for file in shards(tmp_path)} == names
    assert not list(tmp_path.glob(".*.partial"))


def test_texts_are_written_before_long_without_being_asked(
    tmp_path: Path, empty: FeatureManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_LONGEST_WAIT_S", 0.2)
    recorder = opened(tmp_path, empty)
    recorder.put(piece(1, width=empty.verifier.hidden_size))
    until(lambda: recorder.counts().num_written == 1, timeout_s=5)


def test_a_folder_of_another_target_is_refused(tmp_path: Path, empty: FeatureManifest) -> None:
    content = json.loads(empty.write(tmp_path).read_text())
    content["weights_sha256"] = "other"
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="another target"):
        opened(tmp_path, empty)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, empty: FeatureManifest) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"recorder\.folder"):
        opened(tmp_path / "file" / "below", empty)


def test_a_share_of_the_requests_is_sampled(tmp_path: Path, empty: FeatureManifest) -> None:
    recorder = opened(tmp_path, empty, sample_rate=0.25)
    request = Request(request_id=RequestId("r"), prompt=(TokenId(1),), sampling=SamplingParams())
    assert 400 < sum(recorder.wants(request) for _ in range(2000)) < 600


def test_the_recorder_is_off_unless_a_folder_is_named(target: Path, tmp_path: Path) -> None:
    tree: dict[str, object] = {"engine": {"model": {"path": str(target)}}}
    assert stages_of(service_config(tree)) == EngineStages()
    config = service_config({**tree, "recorder": {"folder": str(tmp_path)}})
    assert stages_of(config) == EngineStages(open_recorder=OpenRecorder(config.recorder))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
