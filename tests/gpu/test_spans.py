"""Spans and exit heads on the device against the CPU, and against transformers.

The reference is this project's span on the CPU in float32, with the same bfloat16 weights. Errors
are |x - reference| / |reference|. In float32 they have to be as small as those of another order of
sums: tf32 would fail. In bfloat16 they may be at most twice those of transformers.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eesd_dist.config import DType
from eesd_dist.errors import ConfigError
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.page_table import PageTable
from tests.gpu.conftest import Property
from tests.support.tiny_checkpoints import FAMILIES, tiny_model
from tests.unit.model.paged_stages import Stages

pytestmark = pytest.mark.gpu

FLOAT32_BOUND = 5e-5
_BFLOAT16_FACTOR = 2.0
_BFLOAT16_BOUND = 2e-3
"""Minimum bound, if transformers happens to be closer to the reference."""
_CPU = torch.device("cpu")
_PAGE_SIZE = 16
_FAMILIES_ON_A_CPU = ("model", *list(FAMILIES)[::4])
_SUFFIX = (1, 7, 1, 5, 1, 5)
"""Rows of the last passes over a text, after its prefill."""


# Shapes: T tokens, D hidden channels, V vocabulary.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["model", *FAMILIES])
def test_logits_are_close_to_those_of_the_cpu_and_transformers(
    family: str,
    dtype: DType,
    model: Path,
    device: torch.device,
    is_small: bool,
    tmp_path: Path,
    record_property: Property,
) -> None:
    if is_small and family not in _FAMILIES_ON_A_CPU:
        pytest.skip("needs cuda")
    folder, length = model, 60 if is_small else 300
    if family in FAMILIES:
        folder, length = tmp_path, 120
        tiny_model(family).bfloat16().save_pretrained(folder)
    tokens_T = _tokens(folder, length)
    expected_TV = _logits(_reference(folder, length), tokens_T, [length])
    stages = _stages(folder, dtype, device, length)
    logits_TV = _logits(stages, tokens_T.to(device), [length - sum(_SUFFIX), *_SUFFIX])
    reference_TV = _transformers_logits(folder, dtype, device, tokens_T)
    error = relative_error(logits_TV, expected_TV)
    transformers_error = relative_error(reference_TV, expected_TV)
    agreement = (logits_TV.argmax(-1) == expected_TV.argmax(-1)).double().mean()
    bound = FLOAT32_BOUND
    if dtype == "bfloat16":
        bound = max(_BFLOAT16_FACTOR * transformers_error, _BFLOAT16_BOUND)
    record_property(
        stages.numerics,
        f"error {error:.1e}, bound {bound:.0e}, transformers {transformers_error:.1e}, "
        f"first choices {agreement:.1%}",
    )
    assert error <= bound
    assert dtype == "bfloat16" or transformers_error <= bound


@pytest.mark.parametrize(("dtype", "bound"), [("float32", FLOAT32_BOUND), ("bfloat16", 1e-2)])
def test_logits_of_the_exit_head_are_close_to_those_of_the_cpu(
    dtype: DType, bound: float, model: Path, device: torch.device
) -> None:
    if not (model / "exit_head").is_dir():
        pytest.skip("the model has no exit head")
    length = 60
    draft = _reference(model, length).draft
    with torch.inference_mode():
        hidden_TD = draft.forward(draft.embed(_tokens(model, length)), _plan(length, _CPU))
    expected_TV = _head_logits(model, "float32", _CPU, hidden_TD)
    assert relative_error(_head_logits(model, dtype, device, hidden_TD), expected_TV) <= bound


def relative_error(x: Tensor, expected: Tensor) -> float:
    """Returns the relative error; NaN, which fails every bound, if anything is not finite."""
    error = torch.linalg.vector_norm((x - expected).double())
    return float(error / torch.linalg.vector_norm(expected.double()))


def _reference(folder: Path, length: int) -> Stages:
    """Loads with `fast` numerics: a CPU with many threads may refuse `invariant`, and no bits are
    compared."""
    return Stages.load(folder, numerics="fast", num_pages=_num_pages(length))


def _stages(folder: Path, dtype: DType, device: torch.device, length: int) -> Stages:
    """Loads with `numerics: invariant`, or `fast` if this machine refuses `invariant`."""
    load = partial(Stages.load, folder, dtype=dtype, device=device, num_pages=_num_pages(length))
    try:
        return load(numerics="invariant")
    except ConfigError:
        return load(numerics="fast")


def _num_pages(length: int) -> int:
    return -(-length // _PAGE_SIZE)


def _logits(stages: Stages, tokens_T: Tensor, counts: list[int]) -> Tensor:
    """Runs a text in chunks over pages that are not contiguous; returns its logits on the CPU."""
    num_pages = _num_pages(len(tokens_T))
    table = PageTable((*range(1, num_pages, 2), *range(0, num_pages, 2)))
    logits, start = [], 0
    for count in counts:
        chunk_T = tokens_T[start : start + count]
        logits.append(stages.run(chunk_T, [RowSegment(start, count, table)]).float().cpu())
        start += count
    return torch.cat(logits)


def _transformers_logits(
    folder: Path, dtype: DType, device: torch.device, tokens_T: Tensor
) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        attn_implementation="eager",  # the others leave out what a family adds to its scores
    )
    model = model.eval().to(device)
    with torch.inference_mode():
        logits_1TV: Tensor = model(tokens_T[None].to(device)).logits
    return logits_1TV[0].float().cpu()


@torch.inference_mode()
def _head_logits(folder: Path, dtype: DType, device: torch.device, hidden_TD: Tensor) -> Tensor:
    head = ExitHead.load(
        folder / "exit_head",
        target=ModelSpec.from_folder(folder),
        target_path=folder,
        dtype=dtype,
        numerics="fast",
        device=device,
        num_pages=_num_pages(len(hidden_TD)),
        page_size=_PAGE_SIZE,
    )
    plan = _plan(len(hidden_TD), device)
    return head.logits(head.forward(hidden_TD.to(device), plan)).float().cpu()


def _plan(length: int, device: torch.device) -> RowPlan:
    segment = RowSegment(0, length, PageTable(range(_num_pages(length))))
    return RowPlan.build([segment], page_size=_PAGE_SIZE, device=device, numerics="fast")


def _tokens(folder: Path, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(
        3, ModelSpec.from_folder(folder).vocab_size, (length,), generator=generator
    )
