"""Self-checks run once per machine, and find what they are meant to find."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from eesd_dist.model import attention
from eesd_dist.model.answers import kept
from eesd_dist.model.attention import grouping_is_exact
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
    assert [kept({"shape": [3, 4]}, ask, device=CPU) for _ in range(3)] == [holds] * 3
    assert len(calls) == 1


def test_another_question_or_another_setting_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, ask = counted()
    kept({"threads": 1}, ask, device=CPU)
    kept({"threads": 2}, ask, device=CPU)
    assert len(calls) == 2
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    kept({"threads": 1}, ask, device=CPU)
    assert len(calls) == 3


def test_a_gpu_is_asked_every_time(folder: Path) -> None:
    calls, ask = counted()
    for _ in range(2):
        assert kept({}, ask, device=torch.device("cuda", 0))
    assert len(calls) == 2
    assert not folder.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"key": "another", "holds": true}'])
def test_a_damaged_answer_is_asked_for_again(folder: Path, content: str) -> None:
    calls, ask = counted(holds=False)
    kept({}, ask, device=CPU)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert not kept({}, ask, device=CPU)
    assert not kept({}, ask, device=CPU)
    assert len(calls) == 2


def test_a_folder_that_cannot_be_made_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EESD_CACHE_DIR", str(tmp_path / "file"))
    calls, ask = counted()
    assert [kept({}, ask, device=CPU) for _ in range(2)] == [True, True]
    assert len(calls) == 2


def test_no_partial_file_stays(folder: Path) -> None:
    kept({}, counted()[1], device=CPU)
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


def groups_exactly(*, num_kv_heads: int, queries_per_kv: int, page_size: int, longest: int) -> bool:
    """Runs the check every time, without the cache of the process."""
    return bool(
        grouping_is_exact.__wrapped__(
            num_kv_heads=num_kv_heads,
            queries_per_kv=queries_per_kv,
            head_dim=32,
            page_size=page_size,
            longest=longest,
            dtype=torch.float32,
            device=CPU,
            num_threads=torch.get_num_threads(),
        )
    )


def long_texts_in_two_parts(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Computes attention in which sums over more than 1,000 keys depend on the number of rows."""
    mixed = functional.scaled_dot_product_attention(queries, keys, values, mask)
    if keys.shape[2] < 1_000 or queries.shape[2] < 12:
        return mixed
    assert mask is not None
    order = torch.arange(keys.shape[2] - 1, -1, -1)
    return functional.scaled_dot_product_attention(
        queries, keys[:, :, order], values[:, :, order], mask[..., order]
    )


def test_attention_is_checked_near_the_end_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(longest: int) -> bool:
        return groups_exactly(num_kv_heads=2, queries_per_kv=2, page_size=32, longest=longest)

    assert holds(2_048)
    monkeypatch.setenv("EESD_CACHE_DIR", os.environ["EESD_CACHE_DIR"] + "/double")

    class Double:
        scaled_dot_product_attention = staticmethod(long_texts_in_two_parts)

    monkeypatch.setattr(attention, "functional", Double)
    assert holds(512)
    assert not holds(2_048)


def few_rows_by_their_place(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Computes attention in which, over up to eight keys, one row in fifteen has other bits unless
    it is first."""
    mixed = functional.scaled_dot_product_attention(queries, keys, values, mask)
    if keys.shape[2] > 8:
        return mixed
    is_later_Q = torch.arange(queries.shape[2]) > 0
    is_one_of_few = queries[..., 0] < -1.5
    return torch.where((is_later_Q & is_one_of_few)[..., None], mixed * (1 + 2**-23), mixed)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("page_size", [4, 8])
def test_attention_is_checked_at_every_row_over_few_keys(
    monkeypatch: pytest.MonkeyPatch, page_size: int, num_kv_heads: int
) -> None:
    class Double:
        scaled_dot_product_attention = staticmethod(few_rows_by_their_place)

    monkeypatch.setattr(attention, "functional", Double)
    assert not groups_exactly(
        num_kv_heads=num_kv_heads, queries_per_kv=1, page_size=page_size, longest=512
    )
