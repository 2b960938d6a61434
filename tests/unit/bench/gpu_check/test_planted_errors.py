"""The checks find planted errors."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eesd_dist.bench.gpu_check.report_rows import Row, Rows
from eesd_dist.bench.gpu_check.sections import attending, exactness, noise, spans
from eesd_dist.bench.gpu_check.sections.products import first_difference
from eesd_dist.bench.gpu_check.sections.pytests import marked_files
from eesd_dist.bench.gpu_check.sections.ranks import run_ranks
from eesd_dist.bench.gpu_check.sections.timer import time_of
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.model.attention.pages import LayerPages
from eesd_dist.model.attention.rows import RowPlan

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]


@pytest.fixture
def rows() -> tuple[Rows, list[Row]]:
    found: list[Row] = []
    return Rows("planted", found.append), found


def failed(found: list[Row]) -> set[str]:
    return {row.name for row in found if row.ok is False}


def test_a_product_that_sees_its_neighbours_is_found() -> None:
    weight_OI = torch.randn(24, 16)
    x_MI = torch.randn(60, 16)

    def each(x: Tensor) -> Tensor:
        return torch.stack([weight_OI @ row for row in x])

    def from_32_rows_on(x: Tensor) -> Tensor:
        return each(x) if len(x) < 32 else each(x) * (1 + 2e-7)

    assert first_difference(each, x_MI) is None
    assert first_difference(from_32_rows_on, x_MI) == "in rows [0, 33)"  # no call has 32


def test_attention_that_depends_on_the_number_of_rows_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = attending.AttentionShape(num_kv_heads=2, queries_per_kv=2, head_dim=32)

    def difference() -> str | None:
        return attending.first_difference(
            shape, dtype=torch.float32, device=CPU, lengths=[300, 500]
        )

    assert difference() is None
    true = LayerPages.attend

    def otherwise_at_long_contexts(pages: LayerPages, rows: RowPlan, heads_THE: Tensor) -> Tensor:
        mixed_TD = true(pages, rows, heads_THE)
        is_far_T = rows.positions > 320
        return torch.where(is_far_T[:, None] & (rows.num_rows > 20), mixed_TD * 1.0000002, mixed_TD)

    monkeypatch.setattr(LayerPages, "attend", otherwise_at_long_contexts)
    found = difference()
    assert found is not None
    assert found.endswith("of 500")


def test_noise_with_one_other_bit_is_found(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[Rows, list[Row]]
) -> None:
    report, found = rows
    true = noise.gumbel

    def one_bit(keys: list[int], ids_V: Tensor) -> Tensor:
        drawn = true(keys, ids_V)
        if ids_V.dtype == torch.int64:
            drawn.view(torch.int32)[-1, 77] ^= 1
        return drawn

    monkeypatch.setattr(noise, "gumbel", one_bit)
    noise._noise(CPU, 2_000, 4, report)
    assert failed(found) == {"gumbel, int64 ids below 2000"}
    assert found[1].value == 1.0


def test_a_filter_that_depends_on_its_batch_is_found(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[Rows, list[Row]]
) -> None:
    report, found = rows
    true = noise.processed

    def wider_alone(logits_SV: Tensor, *rest: object) -> Tensor:
        kept = true(logits_SV, *rest)  # type: ignore[arg-type]
        return kept if len(logits_SV) > 1 else kept.nan_to_num(neginf=0.0)

    monkeypatch.setattr(noise, "processed", wider_alone)
    noise._filters(CPU, 500, 3, report)
    assert failed(found) == {
        f"{name}: again, alone, in another batch"
        for name in ("top_k", "min_p", "top_p", "top_p in top_k")
    }


def test_nan_is_no_small_error() -> None:
    error = spans.relative_error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]))
    assert not error <= spans.FLOAT32_BOUND


@pytest.mark.parametrize(
    ("said", "status", "ok", "value"),
    [
        ({"tokens": 500, "mismatches": 0}, 0, True, 0.0),
        ({"tokens": 500, "mismatches": 2}, 1, False, 2.0),
        ({"tokens": 0, "mismatches": 0}, 0, False, 0.0),
        ({"tokens": 500, "mismatches": 0}, 3, False, 0.0),
        (None, 2, False, "exit status 2"),
    ],
)
def test_what_the_fuzz_says_becomes_a_row(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rows: tuple[Rows, list[Row]],
    said: dict[str, int] | None,
    status: int,
    ok: bool,
    value: float | str,
) -> None:
    report, found = rows
    line = "" if said is None else f"print('progress'); print({json.dumps(said)!r})"
    plant_fuzz(monkeypatch, tmp_path, f"{line}\nsys.exit({status})")
    exactness.run(setting(tmp_path), report)
    assert [(row.name, row.ok, row.value) for row in found] == [("fuzz, bfloat16", ok, value)]


def test_a_fuzz_that_is_stopped_tells_what_it_has_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: tuple[Rows, list[Row]]
) -> None:
    report, found = rows
    body = """
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('{"tokens": 70, "mismatches": 0}')
    sys.exit(130)
"""
    plant_fuzz(monkeypatch, tmp_path, body)
    monkeypatch.setattr(exactness, "_STOPPING_S", 5.0)
    exactness.run(setting(tmp_path, seconds=13.0), report)
    (row,) = found
    assert (row.ok, row.detail) == (True, "70 tokens, seed 1, its time was over")


def test_the_fuzz_is_started_with_options_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: tuple[Rows, list[Row]]
) -> None:
    report, found = rows
    body = """
from eesd_dist.bench.options import FuzzOptions
from eesd_dist.command_line import run_command

def main(options: FuzzOptions) -> None:
    print('{"tokens": %d, "mismatches": 0}' % options.tokens)

sys.exit(run_command(main, sys.argv[1:], program="fuzz"))
"""
    plant_fuzz(monkeypatch, tmp_path, body)
    exactness.run(setting(tmp_path), report)
    assert [(row.ok, row.detail) for row in found] == [(True, "100 tokens, seed 1")]


def plant_fuzz(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    (folder / "toy_fuzz.py").write_text(f"import sys, time\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(exactness, "_FUZZ", "toy_fuzz")


def test_a_checkout_without_the_fuzz_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: tuple[Rows, list[Row]]
) -> None:
    monkeypatch.setattr(exactness, "_FUZZ", "no_such_module")
    exactness.run(setting(tmp_path), rows[0])
    assert [(row.ok, row.value) for row in rows[1]] == [(None, "not available")]


def setting(folder: Path, *, seconds: float = 60.0) -> Setting:
    return Setting(device_name="cpu", model=folder, scratch=folder, seconds=seconds)


def test_a_rank_that_cannot_join_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    (report,) = run_ranks("exchange", ["cuda:0"], seconds=60.0)
    assert (report.ok, report.formed) == (False, False)
    assert report.said


def test_the_tests_marked_gpu_are_found() -> None:
    names = {file.name for file in marked_files(ROOT / "tests")}
    assert "test_noise.py" in names
    assert len(names) < 20


def test_a_time_is_a_median_of_many() -> None:
    assert 0.0 < time_of(lambda: torch.ones(10).sum(), CPU, budget_s=0.01).device_s < 0.1
