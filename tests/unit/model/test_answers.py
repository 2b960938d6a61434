"""Self-checks run once per machine, and find what they are meant to find."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.model.answers import cached_answer
from eesd_dist.model.kernels import Candidate, Linear, in_row_tiles, rows_are_independent

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps the results of these planted functions out of the cache of other tests."""
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path))
    return tmp_path / "self_checks"


def counted(holds: bool = True) -> tuple[list[int], Callable[[], bool]]:
    calls: list[int] = []

    def ask() -> bool:
        calls.append(1)
        return holds

    return calls, ask


@pytest.mark.parametrize("holds", [True, False])
def test_an_answer_is_asked_for_once(holds: bool) -> None:
    calls, ask = counted(holds)
    assert [cached_answer({"shape": [3, 4]}, ask, device=CPU) for _ in range(3)] == [holds] * 3
    assert len(calls) == 1


def test_another_question_or_another_setting_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, ask = counted()
    cached_answer({"threads": 1}, ask, device=CPU)
    cached_answer({"threads": 2}, ask, device=CPU)
    assert len(calls) == 2
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    cached_answer({"threads": 1}, ask, device=CPU)
    assert len(calls) == 3


def test_a_gpu_is_asked_every_time(folder: Path) -> None:
    calls, ask = counted()
    for _ in range(2):
        assert cached_answer({}, ask, device=torch.device("cuda", 0))
    assert len(calls) == 2
    assert not folder.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"key": "another", "holds": true}'])
def test_a_damaged_answer_is_asked_for_again(folder: Path, content: str) -> None:
    calls, ask = counted(holds=False)
    cached_answer({}, ask, device=CPU)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert not cached_answer({}, ask, device=CPU)
    assert not cached_answer({}, ask, device=CPU)
    assert len(calls) == 2


def test_a_folder_that_cannot_be_made_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "file"))
    calls, ask = counted()
    assert [cached_answer({}, ask, device=CPU) for _ in range(2)] == [True, True]
    assert len(calls) == 2


def test_no_partial_file_stays(folder: Path) -> None:
    cached_answer({}, counted()[1], device=CPU)
    assert [file.suffix for file in folder.iterdir()] == [".json"]


def half_by_half(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Sums wide products of many rows in two halves: only the full shape shows it."""

    def multiply(x_MI: Tensor) -> Tensor:
        if len(x_MI) < 500 or len(weight_OI) < 3_000:
            return functional.linear(x_MI, weight_OI, bias_O)
        half = weight_OI.shape[1] // 2
        return functional.linear(x_MI[:, :half], weight_OI[:, :half], bias_O) + functional.linear(
            x_MI[:, half:], weight_OI[:, half:]
        )

    return multiply


def agrees(candidate: Candidate, *, num_out: int) -> bool:
    return rows_are_independent(
        candidate,
        num_out=num_out,
        num_in=2_048,
        dtype=torch.float32,
        device=CPU,
        num_threads=torch.get_num_threads(),
    )


def test_a_product_is_checked_in_its_full_shape() -> None:
    assert not agrees(Candidate("half by half", half_by_half), num_out=3_072)


def test_tiles_of_equal_rows_keep_the_promise_of_a_product_that_does_not() -> None:
    tiled = Candidate("half by half in tiles", in_row_tiles(half_by_half, tile_rows=4))
    assert agrees(tiled, num_out=3_072)
