"""What a dry run states, against the bytes of a real small run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.distill.collect import CollectOptions, collect
from eesd_dist.distill.estimate import HeadSize, Rates, described, estimate
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.features import row_bytes
from eesd_dist.distill.run import RunRequest
from eesd_dist.distill.train.request import TrainOptions
from eesd_dist.distill.train_head import train
from eesd_dist.engine.recording.text_features import MAX_BYTES
from eesd_dist.model.heads.head_config import HeadKind
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from serve_app.cli.main import main
from tests.support.drafters import save_target
from tests.support.tiny_tokenizer import write_byte_level

NUM_PROMPTS = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_target(write_byte_level(tmp_path_factory.mktemp("target")), vocab_size=320)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = 319  # hardly ever written: answers are as long as they may be
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def request_of(target: Path, tmp_path: Path) -> RunRequest:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "say {n} twice"}}\n' for n in range(NUM_PROMPTS)))
    return RunRequest(
        collect=CollectOptions(
            model=target,
            prompts=prompts,
            max_tokens=20,
            max_length=80,
            chunk_size=5,
            top_k=8,
            held_out=4,
            dtype="float32",
        ),
        out=tmp_path / "out",
        exit_layer=2,
        max_steps=12,
        head="own",
        options=TrainOptions(rows=4, length=32, checkpoint_every_steps=4),
    )


def test_disk_is_what_a_real_run_writes(request_of: RunRequest) -> None:
    prediction = estimate(request_of, Rates())
    manifest = collect(request_of.collection, executor=LocalExecutor(), say=lambda _: None)
    assert prediction.num_sequences == manifest.num_sequences == 2 * (NUM_PROMPTS - 4)
    assert manifest.num_tokens <= prediction.num_rows <= 1.05 * manifest.num_tokens
    assert manifest.num_bytes <= prediction.features_bytes <= 1.1 * manifest.num_bytes

    folder = train(request_of.training, executor=LocalExecutor())
    stored = (folder / "model.safetensors").stat().st_size
    assert stored - 4096 <= prediction.head_bytes <= stored
    checkpoints = [
        sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
        for step in request_of.training.run_folder.glob("step-*")
    ]
    assert len(checkpoints) == 2
    assert 3 * max(checkpoints) <= 1.15 * prediction.checkpoints_bytes
    assert prediction.checkpoints_bytes <= 1.15 * (3 * max(checkpoints) + stored)


@pytest.mark.parametrize("kind", ["own", "shared", "truncated"])
def test_parameters_are_counted_from_the_shapes_alone(target: Path, kind: HeadKind) -> None:
    spec = ModelSpec.from_folder(target)
    head = TrainableExitHead.from_target(
        target,
        spec,
        2,
        head=kind,
        draft_vocab=list(range(0, 200, 2)) if kind == "truncated" else None,
    )
    size = HeadSize.of(spec, kind=kind, draft_vocab=100)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert size.trained == trained
    assert size.total == sum(p.numel() for p in head.parameters())


def test_a_70b_target_takes_what_the_documentation_says() -> None:
    """Llama 3 70B: 8192 wide, 64 heads, 8 KV heads, 28,672 intermediate channels."""
    spec = replace(
        ModelSpec.from_folder(Path("serve_app/demo_model")),
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
    )
    for num_exits, expected in ((1, 16.6e9), (3, 49.4e9)):
        size = row_bytes(spec.hidden_size, num_exits=num_exits, top_k=32)
        assert size * 1_000_000 == pytest.approx(expected, rel=0.005)
    head = HeadSize.of(spec, kind="truncated", draft_vocab=32_768)
    assert head.layer == pytest.approx(856e6, rel=0.002)
    assert head.lm_head == pytest.approx(268e6, rel=0.002)


def test_partitioning_divides_what_it_partitions(request_of: RunRequest) -> None:
    """ZeRO divides Adam's states, then the gradients, then the weights, over the workers."""
    four = replace(request_of, train_workers=4)
    sizes = [
        estimate(replace(four, zero_stage=stage), Rates()).training_bytes for stage in range(4)
    ]
    trained = HeadSize.of(
        ModelSpec.from_folder(request_of.collect.model), kind="own", draft_vocab=0
    ).trained
    saved = [sizes[stage] - sizes[stage + 1] for stage in range(3)]
    assert saved == pytest.approx([6 * trained, 3 * trained, 3 * trained], rel=1e-6)


def test_time_follows_the_rates_and_is_limited_by_the_minutes(request_of: RunRequest) -> None:
    slow = estimate(request_of, Rates(tokens_per_s=0.1))
    assert slow.collect_s == 0.4 * 60.0 * request_of.minutes
    fast = estimate(request_of, Rates(tokens_per_s=100.0))
    assert fast.collect_s == pytest.approx(24 * 20 / 100.0)
    assert fast.judge_s == pytest.approx(fast.num_judged / 100.0)
    assert fast.pipeline_bytes <= MAX_BYTES
    text = described(fast, request_of, Rates(tokens_per_s=100.0))
    assert "480 tokens at 100 tokens/s" in text


def test_a_dry_run_writes_nothing(
    request_of: RunRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    options = request_of.collect
    words = {
        "--model": options.model,
        "--prompts": options.prompts,
        "--out": request_of.out,
        "--held-out": options.held_out,
        "--max-tokens": options.max_tokens,
        "--max-length": options.max_length,
        "--exit": 2,
    }
    command = [str(word) for pair in words.items() for word in pair]
    assert main(["distill", "run", *command, "--dry-run"]) == 0
    assert "disk: together" in capsys.readouterr().out
    assert not request_of.out.exists()
