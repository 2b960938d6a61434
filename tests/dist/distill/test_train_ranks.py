"""Two processes, each with its own shards, learn what one learns from the rows of both, with every
partitioning of DeepSpeed."""

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eesd_dist.distill.features import FeatureStore
from eesd_dist.distill.train import loop
from eesd_dist.distill.train.batches import BatchReader, PlannedBatch, Position
from eesd_dist.distill.train.learner import alone
from eesd_dist.distill.train.loop import train_rank
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.errors import ConfigError
from tests.dist.distill.ranks import train_and_die, train_as_rank
from tests.support.tiny_features import EXIT_LAYER, write_tiny_features, write_tiny_target

pytestmark = pytest.mark.dist

STEPS = 16
FIGURES = ("loss", "lr", "agreement", "one_minus_tv")


class BothRanks:
    """The batches of both ranks as one: what one process reads to take the steps of two."""

    def __init__(self, store: FeatureStore, **options: Any) -> None:
        rank_options = {**options, "num_ranks": 2}
        self._readers = [BatchReader(store, **{**rank_options, "rank": rank}) for rank in range(2)]

    def batches(self, start: Position) -> Iterator[PlannedBatch]:
        for rank_batches in zip(*(reader.batches(start) for reader in self._readers), strict=True):
            assert rank_batches[0].after == rank_batches[1].after
            yield PlannedBatch(
                rows=[*rank_batches[0].rows, *rank_batches[1].rows], after=rank_batches[0].after
            )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, TrainRequest]:
    """The same steps in one process, and in two with each stage."""
    folder = tmp_path_factory.mktemp("runs")
    target = write_tiny_target(folder / "target")
    write_tiny_features(folder / "features", target, shard_sizes=(3, 25, 1, 19))

    def request(name: str, **changed: Any) -> TrainRequest:
        return TrainRequest(
            model=folder / "target",
            features=folder / "features",
            out=folder / name / "head",
            checkpoints=folder / name / "run",
            exit_layer=EXIT_LAYER,
            max_steps=STEPS,
            options=TrainOptions(
                rows=8, length=16, log_every=1, evaluate_every=8, keep="last", save_dtype="float32"
            ),
            **{"head": "truncated", "draft_vocab": 60, **changed},
        )

    single = {"one": request("one"), "one, shared": request("one, shared", head="shared")}
    pairs = {
        f"two, stage {stage}": request(f"two, stage {stage}", workers=2, zero_stage=stage)
        for stage in range(4)
    }
    pairs["two, shared, stage 3"] = request(
        "two, shared, stage 3", workers=2, zero_stage=3, head="shared"
    )
    resumed = died(pairs["two, stage 2"], folder / "died")
    pairs["two, resumed"] = resumed
    processes = started(train_as_rank, folder / "rendezvous", list(pairs.values()))
    for single_request in single.values():
        with alone(single_request.options), pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "BatchReader", BothRanks)
            train_rank(single_request, rank=0, world_size=1)
    ended_well(processes)
    return {**single, **pairs}


def died(whole: TrainRequest, folder: Path) -> TrainRequest:
    """Returns a run like `whole` of which both processes died after their second checkpoint."""
    options = replace(whole.options, checkpoint_every_steps=5)  # no multiple of a pass
    request = replace(whole, out=folder / "head", checkpoints=folder / "run", options=options)
    for process in started(train_and_die, folder.with_suffix(".rendezvous"), request, 2):
        process.join(120)
        # A rank may also find that the other one has died.
        assert process.exitcode not in (None, 0)
    assert max(request.run_folder.glob("step-*")).name == "step-00000010"
    return request


def started(work: Callable[..., None], rendezvous: Path, *inputs: object) -> list[SpawnProcess]:
    processes = [
        multiprocessing.get_context("spawn").Process(
            target=work, args=(rendezvous, rank, 2, *inputs)
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    return processes


def ended_well(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def curve(request: TrainRequest) -> list[dict[str, Any]]:
    lines = (request.run_folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_have_the_loss_curve_of_one(
    runs: Mapping[str, TrainRequest], stage: int
) -> None:
    expected, rows = curve(runs["one"]), curve(runs[f"two, stage {stage}"])
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row, twin in zip(rows, expected, strict=True):
        for name in FIGURES if row["step"] else ():
            assert row[name] == pytest.approx(twin[name], rel=1e-3, abs=1e-3)
        assert ("held_out" in row) == ("held_out" in twin)
        for name, figure in row.get("held_out", {}).items():
            assert figure == pytest.approx(twin["held_out"][name], rel=1e-3, abs=1e-3)
    losses = [row["loss"] for row in rows[1:]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("two, stage 3", "two, stage 0"),
        ("two, stage 3", "one"),
        ("two, shared, stage 3", "one, shared"),
    ],
)
def test_the_head_saved_at_stage_3_is_the_one_that_stage_0_saves(
    runs: Mapping[str, TrainRequest], name: str, twin: str
) -> None:
    saved = load_file(runs[name].out / "model.safetensors")
    expected = load_file(runs[twin].out / "model.safetensors")
    assert saved.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(saved[key], tensor, rtol=0.0, atol=1e-4)


def test_stage_3_trains_the_head_alone(runs: Mapping[str, TrainRequest]) -> None:
    """The LM head of the target is frozen: it is neither trained nor part of a checkpoint."""
    request = runs["two, shared, stage 3"]
    assert "lm_head.weight" not in load_file(request.out / "model.safetensors")
    states = sorted(request.run_folder.glob(f"step-{STEPS:08d}/*model_states.pt"))
    assert len(states) == 2  # one per rank
    for state in states:
        names = set(torch.load(state, weights_only=False)["module"])
        assert "head.norm_D" in names
        assert "head.lm_head_VD" not in names


def test_two_processes_that_died_go_on_to_the_same_head(
    runs: Mapping[str, TrainRequest],
) -> None:
    """With partitioned state, which the processes save apart."""
    require_same_run(runs["two, resumed"], runs["two, stage 2"])


@pytest.mark.nightly
def test_two_processes_with_whole_state_that_died_go_on_to_the_same_head(
    runs: Mapping[str, TrainRequest], tmp_path: Path
) -> None:
    whole = runs["two, stage 0"]
    request = died(whole, tmp_path / "died")
    ended_well(started(train_as_rank, tmp_path / "second", [request]))
    require_same_run(request, whole)


def require_same_run(request: TrainRequest, whole: TrainRequest) -> None:
    for row, twin in zip(curve(request), curve(whole), strict=True):
        assert {**row, "seconds": 0} == {**twin, "seconds": 0}
    resumed, expected = (
        load_file(train_request.out / "model.safetensors") for train_request in (request, whole)
    )
    assert all(torch.equal(resumed[key], tensor) for key, tensor in expected.items())


def test_partitioned_state_is_not_resumed_by_another_number_of_processes(
    runs: Mapping[str, TrainRequest],
) -> None:
    request = replace(runs["two, stage 2"], workers=1)
    with alone(request.options), pytest.raises(ConfigError, match="workers 2, now asked for 1"):
        train_rank(request, rank=0, world_size=1)
    with alone(request.options), pytest.raises(ConfigError, match="1 processes for a run of 2"):
        train_rank(runs["two, stage 2"], rank=0, world_size=1)
