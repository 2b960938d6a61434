"""The layers as one compiled call against the same layers step by step."""

from pathlib import Path

import pytest
import torch

from eesd_dist.backends.cpu import calls
from eesd_dist.backends.cpu.kernels.layers import layers_kernel
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.layers.paged_layers import LayerRows
from tests.support.stepwise_cpu import stepwise_layers
from tests.support.tiny_checkpoints import FAMILIES, save_tiny_model
from tests.unit.model.paged_stages import Stages

PIECES = [40, 1, 6, 28]
NUM_TOKENS = sum(PIECES)
PAGES = (9, 2, 30, 4, 17)


def random_tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(5))


def logits(stages: Stages) -> torch.Tensor:
    return stages.run_in_chunks(random_tokens(NUM_TOKENS), pages=PAGES, chunks=PIECES)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_computes_what_its_steps_do(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family=family)
    stages = Stages.load(tmp_path)
    assert stages.verify.paged.fused is not None
    logits_TV = logits(stages)
    with stepwise_layers():
        stepwise = Stages.load(tmp_path)
    assert stepwise.verify.paged.fused is None
    torch.testing.assert_close(logits_TV, logits(stepwise), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3, biases"])
def test_threads_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    save_tiny_model(tmp_path, family=family)
    expected_TV = logits(Stages.load(tmp_path, dtype=dtype))
    monkeypatch.setattr(calls, "_WORTH_A_THREAD", 1)
    for num_threads in (2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        assert torch.equal(logits(Stages.load(tmp_path, dtype=dtype)), expected_TV)


def test_rows_kept_after_a_layer_change_no_bit(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    stages, twin = Stages.load(tmp_path), Stages.load(tmp_path)
    tokens_T = random_tokens(9)
    rows = RowPlan.build(
        [RowSegment(0, 9, PAGES)], page_size=16, device=torch.device("cpu"), numerics="invariant"
    )
    hidden_TD = stages.draft.forward(stages.draft.embed(tokens_T), rows)
    expected_TD = stages.verify.forward(hidden_TD, rows)
    num_layers = stages.verify.spec.num_layers
    layer_rows = LayerRows(range(1, num_layers + 1))
    draft_TD = twin.draft.forward(twin.draft.embed(tokens_T), rows, layer_rows=layer_rows)
    verify_TD = twin.verify.forward(draft_TD, rows, layer_rows=layer_rows)
    assert torch.equal(verify_TD, expected_TD)
    assert sorted(layer_rows.rows) == list(range(1, num_layers + 1))
    assert torch.equal(layer_rows.rows[1], hidden_TD)
    assert torch.equal(layer_rows.rows[num_layers], expected_TD)
    assert not torch.equal(layer_rows.rows[2], expected_TD)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_one_layer_are_stored_without_computing_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, num_threads: int
) -> None:
    save_tiny_model(tmp_path, family=family)
    monkeypatch.setattr(calls, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    stored, computed = (Stages.load(tmp_path, dtype=dtype).draft for _ in range(2))
    rows = RowPlan.build(
        [RowSegment(3, 40, PAGES), RowSegment(0, 2, (11,))],
        page_size=16,
        device=torch.device("cpu"),
        numerics="invariant",
    )
    hidden_TD = computed.embed(random_tokens(42))
    stored.paged.store_kv(hidden_TD, rows)
    computed.paged.forward(hidden_TD, rows)
    pages_B = stored.paged.read_pages(0, range(32))
    assert torch.equal(pages_B, computed.paged.read_pages(0, range(32)))
    assert pages_B.any()


def test_no_call_compiles_the_layers_again(tmp_path: Path) -> None:
    counts = set()
    for at, family in enumerate(FAMILIES):
        save_tiny_model(tmp_path / str(at), family=family)
        logits(Stages.load(tmp_path / str(at)))
        counts.add(len(layers_kernel().signatures))
    assert len(counts) == 1
