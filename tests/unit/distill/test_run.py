"""What a run of `eesd distill` may go on with, and what it refuses; no step is run here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.distill.collector import finish
from eesd_dist.distill.features import ShardEntry
from eesd_dist.distill.folders import only_one, write_json
from eesd_dist.errors import CheckpointError, ConfigError
from serve_app.config import BUNDLED_MODEL
from serve_app.distill import main as distill
from serve_app.distill.collect import CollectRequest, collect, planned, recipe_of
from serve_app.distill.run import RUN_FILE, RunRequest, asked_of, run


def _request(folder: Path) -> RunRequest:
    return RunRequest(
        collect=CollectRequest(model=BUNDLED_MODEL, out=Path(), exits=(1,)), out=folder / "out"
    )


def _collecting(request: RunRequest, **changes: object) -> RunRequest:
    return replace(request, collect=replace(request.collect, **changes))  # type: ignore[arg-type]


CHANGES: list[tuple[str, Callable[[RunRequest], RunRequest]]] = [
    ("exit 1, expected 2", lambda r: _collecting(r, exits=(2,))),
    ("minutes 16", lambda r: replace(r, minutes=8.0)),
    ("temperatures", lambda r: _collecting(r, temperatures=(0.5,))),
    ("seed 0, expected 1", lambda r: _collecting(r, seed=1)),
    ("training .*truncated", lambda r: replace(r, head="own")),
    ("prompts '[0-9a-f]+', expected None", lambda r: _collecting(r, prompts=None)),
]


@pytest.mark.parametrize(("message", "change"), CHANGES)
def test_other_options_are_refused_with_what_was_found(
    tmp_path: Path, message: str, change: Callable[[RunRequest], RunRequest]
) -> None:
    request = _request(tmp_path)
    write_json(request.out / RUN_FILE, asked_of(request))
    with pytest.raises(CheckpointError, match=f"found a run with {message}.*another folder"):
        run(change(request), say=lambda _: None)
    assert not (request.out / "features").exists()


def test_prompts_that_cannot_be_used_leave_the_folder_unclaimed(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 5}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1: found prompt 5"):
        run(_collecting(_request(tmp_path), prompts=prompts), say=lambda _: None)
    assert not (tmp_path / "out" / RUN_FILE).exists()


def test_how_many_work_at_it_is_no_part_of_what_was_asked(tmp_path: Path) -> None:
    request = _request(tmp_path)
    wider = _collecting(request, workers=8, threads=4, address="there:6379")
    assert asked_of(wider) == asked_of(request)
    assert asked_of(replace(request, out=tmp_path / "moved")) == asked_of(request)


def test_the_minutes_leave_some_for_calibrating_and_judging(tmp_path: Path) -> None:
    request = replace(_request(tmp_path), minutes=20.0)
    collecting, training = request.collection.minutes, request.training.minutes
    assert collecting is not None
    assert training is not None
    assert collecting == training == pytest.approx(8.0)
    assert request.training.features == request.collection.out
    assert request.shortened(32) == 32
    assert replace(request, minutes=4.0).shortened(32) == 8
    assert replace(request, minutes=0.1).shortened(32) == 2


def test_a_folder_has_one_worker_at_a_time_and_its_scraps_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".shard-00001.safetensors.77.partial").write_bytes(b"torn")
    with only_one(tmp_path):
        assert not list(tmp_path.glob(".*.partial"))
        with (
            pytest.raises(ConfigError, match="another process is at work here"),
            only_one(tmp_path),
        ):
            raise AssertionError
    with only_one(tmp_path):
        pass


def test_a_finished_store_is_left_as_it_is_and_one_of_another_plan_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "say {n} twice"}}\n' for n in range(8)))
    request = CollectRequest(
        model=BUNDLED_MODEL, out=tmp_path / "features", exits=(1,), prompts=file, passes=1
    )
    entry = ShardEntry(name="s", num_sequences=1, num_tokens=1, num_bytes=1, crc32=0)
    recipe = recipe_of(request)
    made = finish(request.out, [entry], planned(request, recipe), recipe)
    said: list[str] = []
    assert collect(request, say=said.append) == made
    assert said[0].startswith("collect: done before, 1 tokens of 1 sequences in 1 shards")
    other = replace(request, max_tokens=10)
    with pytest.raises(CheckpointError, match="collected from another target, or other prompts"):
        collect(other, say=said.append)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exits": (32,)}, "exit layer 32: expected 1 to 31"),
        ({"max_tokens": 2048, "max_length": 4096}, "raise max_length or lower max_tokens"),
    ],
)
def test_what_the_target_cannot_do_is_refused_before_anything_starts(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    request = CollectRequest(model=BUNDLED_MODEL, out=tmp_path, exits=(1,))
    with pytest.raises(ConfigError, match=message):
        collect(replace(request, **change), say=lambda _: None)  # type: ignore[arg-type]


def test_an_unknown_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="eesd distill trian: expected one of run, collect"):
        distill.main(["trian"])
    with pytest.raises(SystemExit):
        distill.main([])
    assert "eesd distill run" in capsys.readouterr().out


@pytest.mark.parametrize("command", distill.COMMANDS)
def test_every_step_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        distill.main([command, "--help"])
    assert left.value.code == 0
    assert f"eesd distill {command}" in capsys.readouterr().out
