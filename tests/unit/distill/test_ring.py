"""Collecting and training alternate, and the disk never has more features than allowed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eesd_dist.distill.collect import CollectOptions, collect, planned_parts
from eesd_dist.distill.collector import Chunk, MadeShard, ShardJob
from eesd_dist.distill.estimate import Rates, described, estimate
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.features import FeatureStore, shard_name
from eesd_dist.distill.ring import collect_and_train
from eesd_dist.distill.run import RunRequest, run
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.errors import ConfigError
from tests.support.drafters import save_target
from tests.support.tiny_tokenizer import write_byte_level

MAX_GB = 80e-6
STEPS = 31


class Died(Exception):
    """The process is killed at this point."""


class Watched(LocalExecutor):
    """The real steps in this process; notes the disk after each, and dies after some of them."""

    def __init__(self, out: Path, *, dies_after: int | None = None) -> None:
        self._out = out
        self._left = dies_after
        self.sizes: list[int] = []
        self.made: list[int] = []
        self.trained: list[TrainRequest] = []

    def make_shards(self, job: ShardJob, chunks: Sequence[Chunk]) -> Iterator[MadeShard]:
        for chunk, shard in zip(chunks, super().make_shards(job, chunks), strict=True):
            self.made.append(chunk.index)
            self._look()
            yield shard

    def train(self, request: TrainRequest) -> None:
        super().train(request)
        self.trained.append(request)
        self._look()

    def _look(self) -> None:
        self.sizes.append(features_bytes(self._out))
        if self._left is not None:
            self._left -= 1
            if not self._left:
                raise Died


def features_bytes(out: Path) -> int:
    return sum(file.stat().st_size for file in out.rglob("*shard-*"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(write_byte_level(tmp_path_factory.mktemp("target")), vocab_size=320)


def ring_in(folder: Path, target: Path) -> RunRequest:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "say {n} twice"}}\n' for n in range(28)))
    return RunRequest(
        collect=CollectOptions(
            model=target,
            prompts=prompts,
            max_tokens=20,
            max_length=80,
            chunk_size=6,
            top_k=8,
            held_out=4,
            dtype="float32",
            max_gb=MAX_GB,
        ),
        out=folder / "out",
        max_steps=STEPS,
        head="truncated",
        draft_vocab=40,
        ring=True,
        options=TrainOptions(rows=4, length=32, checkpoint_every_steps=3, save_dtype="float32"),
    )


@pytest.fixture
def ring(target: Path, tmp_path: Path) -> RunRequest:
    return ring_in(tmp_path, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRing:
    """A whole run with a ring, which the tests look at."""

    request: RunRequest
    executor: Watched
    lines: list[str]


@pytest.fixture(scope="module")
def finished(target: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRing:
    request = ring_in(tmp_path_factory.mktemp("ring"), target)
    executor = Watched(request.out)
    lines: list[str] = []
    run(request, executor=executor, say=lines.append)
    return FinishedRing(request=request, executor=executor, lines=lines)


def run_rounds(request: RunRequest, executor: Watched) -> None:
    collect_and_train(request.rounds(), executor=executor, say=lambda _: None)


def num_rounds(request: RunRequest) -> int:
    return request.rounds().count


def test_all_of_the_text_is_trained_on_and_the_disk_is_never_exceeded(
    finished: FinishedRing,
) -> None:
    ring, watched = finished.request, finished.executor
    recipe = ring.collection.recipe()
    chunks = [
        c.index for portion in planned_parts(ring.collect, recipe, say=print) for c in portion
    ]
    assert watched.made == chunks == list(range(len(chunks)))
    assert num_rounds(ring) == len(watched.trained) >= 3
    assert max(watched.sizes) <= MAX_GB * 1e9
    assert max(watched.sizes) > 0.5 * MAX_GB * 1e9
    steps = [request.max_steps or 0 for request in watched.trained]
    assert sum(steps) == STEPS
    assert max(steps) - min(steps) <= 1
    assert (ring.head_folder / "config.json").exists()


def test_a_round_goes_on_from_the_head_of_the_last_one(finished: FinishedRing) -> None:
    ring, watched = finished.request, finished.executor
    for before, request in zip(watched.trained, watched.trained[1:], strict=False):
        assert request.start == before.out
    assert watched.trained[0].start is None
    config = json.loads((ring.head_folder / "config.json").read_text())
    assert config["draft_vocab_size"] == 40
    # What is left: the head, and the last round's features and log.
    assert [folder.name for folder in (ring.out / "rounds").iterdir()] == [
        f"{len(watched.trained) - 1:03d}"
    ]


def test_killed_after_any_step_the_same_command_ends_with_the_same_head(
    finished: FinishedRing, tmp_path: Path
) -> None:
    ring, whole = finished.request, finished.executor
    expected = load_file(ring.head_folder / "model.safetensors")
    killed = replace(ring, out=tmp_path / "killed")
    num_steps = len(whole.sizes)
    shards: list[int] = []
    done = 0
    while True:  # dies after three steps more each time
        watched = Watched(killed.out, dies_after=3)
        try:
            run_rounds(killed, watched)
        except Died:
            done += 1
            shards += watched.made
            assert max(watched.sizes) <= MAX_GB * 1e9
            assert done <= num_steps
            continue
        shards += watched.made
        break
    assert done >= num_rounds(ring)
    assert sorted(shards) == whole.made  # no shard was made twice
    tensors = load_file(killed.head_folder / "model.safetensors")
    assert all(bool((tensors[key] == tensor).all()) for key, tensor in expected.items())


def test_the_whole_command_with_a_ring_ends_with_an_evaluated_head(
    finished: FinishedRing,
) -> None:
    ring = finished.request
    assert (ring.head_folder / "calibration.json").exists()
    assert (ring.head_folder / "evaluation.json").exists()
    assert sum(line.startswith("round ") for line in finished.lines) == num_rounds(ring)

    second_run = Watched(ring.out)
    lines: list[str] = []
    run(ring, executor=second_run, say=lines.append)
    assert not second_run.sizes
    assert sum("done before" in line for line in lines) == 3
    with pytest.raises(ConfigError, match="was begun with ring True, now asked for False"):
        run(replace(ring, ring=False), executor=second_run, say=lines.append)


def test_each_part_is_collected_alone_too(ring: RunRequest) -> None:
    watched = Watched(ring.out)
    portions = planned_parts(ring.collect, ring.collection.recipe(), say=print)
    second = replace(ring.collection, part=1)
    manifest = collect(second, executor=watched, say=lambda _: None)
    assert [entry.name for entry in manifest.shards] == [shard_name(c.index) for c in portions[1]]
    assert FeatureStore(second.out, manifest).num_sequences == sum(
        len(c.sources) for c in portions[1]
    )
    with pytest.raises(
        ConfigError, match=f"part {len(portions)}: the texts have {len(portions)} part"
    ):
        collect(replace(second, part=len(portions)), executor=watched, say=lambda _: None)


def test_a_ring_needs_a_bound_and_a_step_for_each_round(ring: RunRequest) -> None:
    with pytest.raises(ConfigError, match="ring is set without max_gb"):
        replace(ring, collect=replace(ring.collect, max_gb=None))
    with pytest.raises(ConfigError, match=r"max_steps is 1 for \d+ rounds"):
        replace(ring, max_steps=1).rounds()


def test_a_dry_run_states_the_disk_of_one_round_and_the_rows_of_all(ring: RunRequest) -> None:
    figures, first = estimate(ring, Rates()), estimate(replace(ring, ring=False), Rates())
    assert figures.features_bytes <= MAX_GB * 1e9
    assert figures.num_rounds == num_rounds(ring)
    assert figures.num_rows > 2 * first.num_rows
    assert f"rows in {figures.num_rounds} rounds" in described(figures, ring, Rates())
