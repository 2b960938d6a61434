"""Which `eesd distill run` may be continued, and which is refused; no step runs here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.distill.collect import CollectOptions
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.folders import write_json
from eesd_dist.distill.run import RUN_FILE, RunRequest, run
from eesd_dist.errors import ConfigError


def _request(folder: Path) -> RunRequest:
    return RunRequest(collect=CollectOptions(model=BUNDLED_MODEL), out=folder / "out")


def _collecting(request: RunRequest, **changes: object) -> RunRequest:
    return replace(request, collect=replace(request.collect, **changes))  # type: ignore[arg-type]


CHANGES: list[tuple[str, Callable[[RunRequest], RunRequest]]] = [
    ("exit 1, now asked for 2", lambda r: replace(r, exit_layer=2)),
    ("minutes 16", lambda r: replace(r, minutes=8.0)),
    ("temperatures", lambda r: _collecting(r, temperatures=(0.5,))),
    ("seed 0, now asked for 1", lambda r: _collecting(r, seed=1)),
    ("training .*truncated", lambda r: replace(r, head="own")),
    ("prompts '[0-9a-f]+', now asked for None", lambda r: _collecting(r, text_only=True)),
]


@pytest.mark.parametrize(("message", "change"), CHANGES)
def test_other_options_are_refused_with_what_was_found(
    tmp_path: Path, message: str, change: Callable[[RunRequest], RunRequest]
) -> None:
    request = _request(tmp_path)
    write_json(request.out / RUN_FILE, request.settings())
    with pytest.raises(ConfigError, match=f"was begun with {message}.*another folder"):
        run(change(request), executor=LocalExecutor(), say=lambda _: None)
    assert not (request.out / "features").exists()


def test_prompts_that_cannot_be_used_leave_the_folder_unclaimed(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 5}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1: found prompt 5"):
        run(
            _collecting(_request(tmp_path), prompts=prompts),
            executor=LocalExecutor(),
            say=lambda _: None,
        )
    assert not (tmp_path / "out" / RUN_FILE).exists()


def test_how_many_work_at_it_is_no_part_of_what_was_asked(tmp_path: Path) -> None:
    request = _request(tmp_path)
    wider = _collecting(request, workers=8, threads=4)
    wider = replace(wider, train_workers=2)
    assert wider.settings() == request.settings()
    assert replace(request, out=tmp_path / "moved").settings() == request.settings()


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
