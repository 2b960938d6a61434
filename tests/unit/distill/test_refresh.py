"""Refreshing a head from a recording: it learns, is compared fairly, and is refused if needed."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.features import (
    FeatureManifest,
    FeatureSequence,
    identity_of,
    weights_fingerprint,
    write_shard,
)
from eesd_dist.distill.refresh import RefreshReport, RefreshRequest, described
from eesd_dist.distill.refresh import refresh as refresh_with
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.distill.train.request import TrainOptions
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from tests.support.drafters import EXIT_LAYER, save_head, save_target
from tests.support.tiny_checkpoints import save_tiny_model

VOCAB = 96
MakeRequest = Callable[..., RefreshRequest]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB)


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    folder = save_head(target, tmp_path / "head", "sometimes")
    (folder / "calibration.json").write_text('{"kept": "as it was"}')
    return folder


def write_recording(
    folder: Path, target: Path, *, count: int = 60, exit_layer: int = EXIT_LAYER, top_k: int = 16
) -> Path:
    """Writes pieces like those of a service: no prompt, greedy and sampled alternately, several
    shards."""
    rng = random.Random(4)
    frozen = FrozenTarget(target, ModelSpec.from_folder(target), [exit_layer])
    texts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(8, 30))] for _ in range(count)]
    sequences = [
        FeatureSequence(
            tokens_T=torch.tensor(text),
            num_prompt=1,
            workload="chat",
            temperature=0.0 if number % 2 else 0.8,
            hidden=view.hidden,
            top_ids_TK=view.top_ids_TK,
            top_logits_TK=view.top_logits_TK,
            lse_T=view.lse_T,
        )
        for number, (text, view) in enumerate(
            zip(texts, frozen.view(texts, top_k=top_k), strict=True)
        )
    ]
    FeatureManifest(
        verifier=identity_of(target),
        weights_sha256=weights_fingerprint(target),
        exits=(exit_layer,),
        top_k=top_k,
        seed=0,
        max_length=512,
        shards=tuple(
            write_shard(folder, shard, sequences[first : first + 25])
            for shard, first in enumerate(range(0, count, 25))
        ),
    ).write(folder)
    return folder


@pytest.fixture
def make_request(target: Path, head: Path, tmp_path: Path) -> MakeRequest:
    def make(recording: Path, **changes: object) -> RefreshRequest:
        options: dict[str, object] = {
            "model": target,
            "recording": recording,
            "head": head,
            "out": tmp_path / "new",
            "minutes": None,
            "steps": 60,
            "learning_rate": 3e-3,
            "threads": 1,
        }
        return RefreshRequest(**{**options, **changes})  # type: ignore[arg-type]

    return make


def refresh(request: RefreshRequest) -> RefreshReport:
    options = TrainOptions(rows=8, length=32, save_dtype="float32")
    return refresh_with(request, options, executor=LocalExecutor(), say=quiet)


def quiet(text: str) -> None:
    assert text


def test_a_refreshed_head_is_accepted_more_often_on_pieces_it_has_not_seen(
    target: Path, head: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target)
    report = refresh(make_request(recording))
    assert report.num_pieces == 60
    assert report.num_held_out == 12
    assert report.gain.rises
    assert report.new.acceptance - report.old.acceptance == pytest.approx(report.gain.mean)
    assert "worth promoting" in described(report)

    out = tmp_path / "new"
    written = json.loads((out / "refresh.json").read_text())
    assert written["new"]["acceptance"] == report.new.acceptance
    assert "carried over" in written["calibration"]
    assert (out / "calibration.json").read_text() == (head / "calibration.json").read_text()
    spec = ModelSpec.from_folder(target)
    refreshed = TrainableExitHead.read(out, target=spec, target_path=target)
    start = TrainableExitHead.read(head, target=spec, target_path=target)
    assert refreshed.config.kind == start.config.kind
    assert not torch.equal(refreshed.lm_head_VD, start.lm_head_VD)
    assert not (tmp_path / "new.work").exists()


def test_the_same_command_again_finds_its_work_done(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target)
    request = make_request(recording, steps=3)
    first = refresh(request)
    written = (tmp_path / "new" / "model.safetensors").stat().st_mtime_ns
    assert refresh(request) == first
    assert (tmp_path / "new" / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="not what this command would make"):
        refresh(make_request(recording, steps=4))


def test_a_head_that_learnt_nothing_is_not_called_better(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target)
    report = refresh(make_request(recording, steps=1, learning_rate=1e-12))
    assert report.gain.mean == 0.0
    assert not report.gain.rises
    assert "the service keeps its head" in described(report)


def test_shards_with_more_and_with_fewer_best_tokens_make_one_store(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = tmp_path / "recording"
    write_recording(recording / "node-a", target, count=25, top_k=16)
    write_recording(recording / "node-b", target, count=25, top_k=8)
    assert refresh(make_request(recording, steps=2)).num_pieces == 50


def test_an_empty_recording_is_refused(tmp_path: Path, make_request: MakeRequest) -> None:
    with pytest.raises(ConfigError, match=r"found nothing recorded.*recorder\.folder"):
        refresh(make_request(tmp_path / "nothing"))


def test_too_few_pieces_to_compare_on_are_refused(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target, count=20)
    with pytest.raises(ConfigError, match="20 pieces leave 4 to compare on"):
        refresh(make_request(recording))
    shutil.rmtree(recording)
    write_recording(recording, target, count=50)  # the service has recorded more
    assert refresh(make_request(recording, steps=2)).num_pieces == 50


def test_a_copy_of_one_recording_is_not_taken_for_another(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target, count=50)
    request = make_request(recording, steps=2)
    blocked = tmp_path / "new.work" / "run"
    blocked.parent.mkdir()
    blocked.write_text("no folder: training breaks after the recording was copied")
    with pytest.raises(OSError, match="run"):
        refresh(request)
    other = write_recording(tmp_path / "other", target, count=60)
    with pytest.raises(
        ConfigError,
        match=r"new\.work/asked\.json: was begun with recording '.*recording', now asked",
    ):
        refresh(make_request(other, steps=2))
    blocked.unlink()
    assert refresh(request).num_pieces == 50


def test_rows_after_another_layer_are_refused(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target, exit_layer=1)
    with pytest.raises(CheckpointError, match="rows after layer 1, expected rows after layer 2"):
        refresh(make_request(recording))


def test_a_head_of_another_target_is_refused(
    tmp_path: Path, target: Path, make_request: MakeRequest
) -> None:
    other = tmp_path / "other"
    save_tiny_model(other, num_hidden_layers=5)
    recording = write_recording(tmp_path / "recording", target)
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        refresh(make_request(recording, model=other))


def test_what_the_same_target_computed_before_it_was_trained_on_is_refused(
    tmp_path: Path, target: Path, make_request: MakeRequest
) -> None:
    before = tmp_path / "before"
    shutil.copytree(target, before)
    weights = load_file(before / "model.safetensors")
    save_file({name: x * 1.01 for name, x in weights.items()}, before / "model.safetensors")
    recording = write_recording(tmp_path / "recording", before)
    with pytest.raises(CheckpointError, match="by its hashes another target"):
        refresh(make_request(recording))


def test_shards_that_the_service_removed_during_the_refresh_are_left_out(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target, count=75)
    (recording / "shard-00000.safetensors").unlink()
    assert refresh(make_request(recording, steps=2)).num_pieces == 50


def test_a_damaged_shard_is_refused(
    target: Path, tmp_path: Path, make_request: MakeRequest
) -> None:
    recording = write_recording(tmp_path / "recording", target)
    file = recording / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="shard-00001"):
        refresh(make_request(recording))
