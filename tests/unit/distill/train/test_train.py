"""Training a head in one process: it learns from either source, and bad requests are refused."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.features import FeatureStore
from eesd_dist.distill.target import FrozenTarget
from eesd_dist.distill.train import loop
from eesd_dist.distill.train.learner import HeadLearner
from eesd_dist.distill.train.losses import LossOptions
from eesd_dist.distill.train.request import TrainOptions, TrainRequest, draft_tokens
from eesd_dist.distill.train_head import train as train_with
from eesd_dist.errors import ConfigError
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from tests.support.tiny_features import EXIT_LAYER, write_tiny_features, write_tiny_target

OPTIONS = TrainOptions(
    rows=8,
    length=24,
    learning_rate=5e-3,
    log_every=1,
    evaluate_every=10,
    checkpoint_every_steps=20,
    save_dtype="float32",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, target: Path) -> FeatureStore:
    return write_tiny_features(tmp_path_factory.mktemp("features"), target)


@pytest.fixture
def request_(target: Path, store: FeatureStore, tmp_path: Path) -> TrainRequest:
    return TrainRequest(
        model=target,
        features=store.folder,
        out=tmp_path / "head",
        checkpoints=tmp_path / "run",
        exit_layer=EXIT_LAYER,
        head="own",
        max_steps=40,
        threads=1,
        options=OPTIONS,
    )


def train(request: TrainRequest) -> Path:
    return train_with(request, executor=LocalExecutor())


def log_of(request: TrainRequest) -> list[dict[str, Any]]:
    lines = (request.run_folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_head(request: TrainRequest) -> TrainableExitHead:
    spec = ModelSpec.from_folder(request.model)
    return TrainableExitHead.read(request.out, target=spec, target_path=request.model)


def test_a_head_learns_its_target_and_is_saved_with_its_provenance(
    request_: TrainRequest,
) -> None:
    assert train(request_) == request_.out
    rows = log_of(request_)
    assert [row["step"] for row in rows] == list(range(41))
    judged = [row["held_out"] for row in rows if "held_out" in row]
    assert len(judged) == 5
    assert sum(row["loss"] for row in rows[1:11]) > 1.2 * sum(row["loss"] for row in rows[31:])
    assert judged[-1]["loss"] < judged[0]["loss"]
    training = json.loads((request_.out / "config.json").read_text())["provenance"]["training"]
    best = max(range(5), key=lambda at: judged[at]["one_minus_tv"])
    assert training["step"] == 10 * best
    assert training["held_out"] == judged[best]
    assert list((request_.run_folder / "tensorboard").glob("events*"))


def test_the_saved_head_is_as_good_on_held_out_text_as_the_log_says(
    request_: TrainRequest, store: FeatureStore
) -> None:
    """Recomputed from the full logits of the target, at every position that predicts an answer
    token."""
    request = replace(request_, options=replace(OPTIONS, keep="last", held_out_share=0.2))
    train(request)
    last = log_of(request)[-1]["held_out"]
    head = read_head(request)
    target = FrozenTarget(
        request.model, ModelSpec.from_folder(request.model), [EXIT_LAYER], dtype="float32"
    )
    _, held_out = store.split(0.2, request.seed)
    agrees, num_judged = 0, 0
    for sequence in store.sequences(held_out):
        hidden, logits = target.forward(sequence.tokens_T[None], [EXIT_LAYER])
        # The store rounds to bfloat16, and the head was trained on that.
        stored = hidden[EXIT_LAYER].bfloat16().float()
        with torch.no_grad():
            guess = head.training_forward(stored)
        same = guess[0].argmax(-1) == logits[0].argmax(-1)
        agrees += int(same[sequence.num_prompt - 1 :].sum())
        num_judged += sequence.num_tokens - sequence.num_prompt + 1
    assert agrees / num_judged == pytest.approx(last["agreement"], abs=1.01 / num_judged)


@pytest.mark.parametrize(
    "changed",
    [
        {"head": "shared"},
        {"head": "truncated", "draft_vocab": 60},
        {"options": replace(OPTIONS, source="live")},
        {"options": replace(OPTIONS, accumulation=2)},
        {"options": replace(OPTIONS, loss=LossOptions(divergence="tv"))},
        {"options": replace(OPTIONS, loss=LossOptions(divergence="reverse_kl"))},
        {"options": replace(OPTIONS, loss=LossOptions(temperature=2.0))},
        {"zero_stage": 2, "options": replace(OPTIONS, offload_optimizer=True)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_kind_of_head_source_and_loss_learns(
    request_: TrainRequest, changed: dict[str, Any]
) -> None:
    request = replace(request_, **changed)
    train(request)
    judged = [row["held_out"]["loss"] for row in log_of(request) if "held_out" in row]
    assert judged[-1] < judged[0]
    head = read_head(request)
    assert head.config.kind == request.head
    if request.head == "truncated":
        assert len(head.draft_tokens) == 60


def test_accumulated_micro_batches_are_one_batch(request_: TrainRequest, tmp_path: Path) -> None:
    curves = []
    for accumulation in (1, 4):
        request = replace(
            request_,
            out=tmp_path / f"head{accumulation}",
            checkpoints=tmp_path / f"run{accumulation}",
            max_steps=20,
            options=replace(OPTIONS, accumulation=accumulation),
        )
        train(request)
        curves.append([row["loss"] for row in log_of(request)[1:]])
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_training_goes_on_from_a_head(request_: TrainRequest, tmp_path: Path) -> None:
    train(replace(request_, options=replace(OPTIONS, keep="last")))
    first = log_of(request_)
    further = replace(request_, start=request_.out, out=tmp_path / "b", checkpoints=tmp_path / "c")
    train(further)
    start, end = log_of(further)[0]["held_out"], first[-1]["held_out"]
    assert start["loss"] == pytest.approx(end["loss"], rel=1e-4)
    with pytest.raises(ConfigError, match="start from another head"):
        train(replace(further, head="shared", checkpoints=tmp_path / "d"))


def test_a_finished_run_is_not_run_again(request_: TrainRequest) -> None:
    train(request_)
    before = (request_.run_folder / "log.jsonl").read_bytes()
    weights = (request_.out / "model.safetensors").read_bytes()
    train(request_)
    assert (request_.run_folder / "log.jsonl").read_bytes() == before
    assert (request_.out / "model.safetensors").read_bytes() == weights


def test_a_finished_head_keeps_other_files_of_its_folder(
    request_: TrainRequest, tmp_path: Path
) -> None:
    request = replace(request_, max_steps=2)
    train(request)
    (request.out / "calibration.json").write_text("fitted")
    assert train(request) == request.out
    assert (request.out / "calibration.json").read_text() == "fitted"
    with pytest.raises(ConfigError, match=r"this training did not make.*use another folder"):
        train(replace(request, seed=1, checkpoints=tmp_path / "other"))
    assert (request.out / "calibration.json").read_text() == "fitted"


def test_what_stands_at_the_heads_place_is_left_alone(request_: TrainRequest) -> None:
    request_.out.mkdir()
    (request_.out / "diary.txt").write_text("dear")
    with pytest.raises(ConfigError, match="head: found a folder with something in it"):
        train(request_)
    assert [file.name for file in request_.out.iterdir()] == ["diary.txt"]
    file = request_.out / "diary.txt"
    with pytest.raises(ConfigError, match=r"diary\.txt: found a file, expected a folder"):
        train(replace(request_, out=file))
    assert file.read_text() == "dear"
    assert not request_.run_folder.exists()


def test_batches_of_prompts_that_weigh_nothing_change_nothing(
    request_: TrainRequest, target: Path, tmp_path: Path
) -> None:
    features = write_tiny_features(tmp_path / "features", target, num_sequences=12)
    # Rows of 2 tokens: some rows of a prompt of 5 contain only prompt tokens.
    options = replace(OPTIONS, rows=1, length=2, prompt_weight=0.0)
    train(replace(request_, features=features.folder, max_steps=20, options=options))
    rows = log_of(request_)[1:]
    assert any(row["loss"] == 0.0 for row in rows)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert all(x.isfinite().all() for x in read_head(request_).parameters())


def test_a_budget_in_minutes_becomes_a_number_of_steps_once(
    request_: TrainRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, clock_s = HeadLearner.learn, [0.0]

    def in_ten_ms(learner: HeadLearner, *arguments: Any, **options: Any) -> Any:
        clock_s[0] += 0.01
        return learn(learner, *arguments, **options)

    monkeypatch.setattr(HeadLearner, "learn", in_ten_ms)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    request = replace(request_, max_steps=None, minutes=0.03)
    train(request)
    steps = [row["step"] for row in log_of(request)]
    assert steps == list(range(steps[-1] + 1))
    assert steps[-1] == pytest.approx(180, abs=2)
    rates = [row["lr"] for row in log_of(request)[1:]]
    assert rates[-1] < 0.1 * max(rates)  # the schedule knew the last step
    assert max(rates) == pytest.approx(OPTIONS.learning_rate, rel=0.05)
    train(request)
    assert [row["step"] for row in log_of(request)] == steps


@pytest.mark.alone
def test_a_run_that_becomes_slower_ends_with_its_minutes(
    request_: TrainRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after those that the number of steps was computed from take ten times as long."""
    learn, began = HeadLearner.learn, time.monotonic()

    def slower(learner: HeadLearner, *arguments: Any, **options: Any) -> Any:
        num_steps.append(1)
        time.sleep(0.1 if len(num_steps) > 12 else 0.01)
        return learn(learner, *arguments, **options)

    num_steps: list[int] = []
    monkeypatch.setattr(HeadLearner, "learn", slower)
    options = replace(OPTIONS, warmup_steps=12, evaluate_every=1000)
    request = replace(request_, max_steps=None, minutes=0.05, options=options)
    train(request)
    assert time.monotonic() - began < 10.0
    rows = log_of(request)
    assert 12 < rows[-1]["step"] < 60
    assert 3.0 <= rows[-1]["seconds"] < 6.0
    assert "held_out" in rows[-1]
    train(request)
    assert log_of(request) == rows


def test_the_draft_vocabulary_is_what_the_target_writes_most(store: FeatureStore) -> None:
    only = range(20)
    written: dict[int, int] = {}
    for sequence in store.sequences(only):
        for token in sequence.tokens_T[sequence.num_prompt :].tolist():
            written[token] = written.get(token, 0) + 1
    chosen = draft_tokens(store, only, count=30).tolist()
    assert chosen == sorted(chosen)
    assert len(chosen) == 30
    rarest = min(written.get(token, 0) for token in chosen)
    assert all(count <= rarest for token, count in written.items() if token not in chosen)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_steps": None}, "set one to end the training"),
        ({"minutes": 0.0}, "minutes is 0"),
        ({"zero_stage": 4}, "expected 0, 1, 2 or 3"),
        ({"workers": 3}, "multiple of 3"),
        ({"exit_layer": 2}, "collect with --exits 2"),
    ],
)
def test_a_request_that_does_not_fit_together_is_refused(
    request_: TrainRequest, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        train(replace(request_, **changed))
    assert not request_.out.exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1"),
        ({"held_out_share": 1.0}, "held_out_share"),
        ({"offload_optimizer": True}, "use zero_stage 1, 2 or 3"),
        ({"device": "cuda"}, "device is cuda and torch sees no CUDA device"),
        ({"bfloat16": True}, "leave bfloat16 off"),
    ],
)
def test_options_that_this_machine_or_run_cannot_have_are_refused(
    request_: TrainRequest, changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match=says):
        train(replace(request_, options=replace(OPTIONS, **changed)))
