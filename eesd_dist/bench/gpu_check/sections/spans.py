"""Checks spans and exit heads on the device against the CPU, and against transformers.

The reference is this project's span on the CPU in float32, with the same bfloat16 weights. Errors
are |x - reference| / |reference|. In float32 they have to be as small as those of another order of
sums: tf32 would fail. In bfloat16 they may be at most twice those of transformers.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eesd_dist.bench.gpu_check.checkpoints import FAMILIES, write_small
from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.sections.stages import PAGE_SIZE, TwoSpans
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.config import DType
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.page_table import PageTable

FLOAT32_BOUND = 5e-5
_BFLOAT16_FACTOR = 2.0
_BFLOAT16_BOUND = 2e-3
"""Minimum bound, if transformers happens to be closer to the reference."""

_DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
_CPU = torch.device("cpu")


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    length = 60 if setting.is_small else 300
    _model("bundled", setting.model, device, length, rows)
    if (setting.model / "exit_head").is_dir():
        _exit_head(setting.model, device, length, rows)
    families = list(FAMILIES)[::3] if setting.is_small else list(FAMILIES)
    for number, family in enumerate(families):
        folder = write_small(setting.scratch / str(number), family)
        _model(family, folder, device, 120, rows)


class Compared(NamedTuple):
    """Errors of one checkpoint's logits in one type."""

    ours: float
    theirs: float
    max_abs: float
    agreement: float
    """Share of rows with the largest logit at the same token as the reference."""


def _model(name: str, folder: Path, device: torch.device, length: int, rows: Rows) -> None:
    for dtype in _DTYPES:
        found, numerics = compare(folder, dtype, device, length)
        bound = FLOAT32_BOUND
        if dtype == "bfloat16":
            bound = max(_BFLOAT16_FACTOR * found.theirs, _BFLOAT16_BOUND)
        ok = found.ours <= bound and (dtype == "bfloat16" or found.theirs <= bound)
        rows.prove(
            f"{name}, {dtype}",
            ok,
            value=found.ours,
            unit="rel.",
            detail=f"bound {bound:.0e}, transformers {found.theirs:.1e}, max {found.max_abs:.1e}, "
            f"first choices {found.agreement:.1%}, {numerics}",
        )


def compare(folder: Path, dtype: DType, device: torch.device, length: int) -> tuple[Compared, str]:
    """Returns the errors, and which `numerics` ran."""
    tokens_T = _tokens(folder, length)
    pieces = [length - 20, 1, 7, 1, 5, 1, 5]
    reference = _reference(folder, length)
    expected_TV = reference.run(tokens_T, [length])[1]
    spans = TwoSpans.load_invariant(folder, dtype=dtype, device=device, length=length)
    found_TV = spans.run(tokens_T, pieces)[1]
    theirs_TV = _transformers_logits(folder, dtype, device, tokens_T)
    agreement = (found_TV.argmax(-1) == expected_TV.argmax(-1)).double().mean()
    compared = Compared(
        ours=relative_error(found_TV, expected_TV),
        theirs=relative_error(theirs_TV, expected_TV),
        max_abs=float((found_TV - expected_TV).abs().max()),
        agreement=float(agreement),
    )
    return compared, spans.numerics


def _reference(folder: Path, length: int) -> TwoSpans:
    """Loads the reference, with `fast` numerics: a CPU with many threads may refuse `invariant`,
    and no bits are compared here."""
    return TwoSpans.load(folder, dtype="float32", numerics="fast", device=_CPU, length=length)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the relative error; NaN, which fails every bound, if anything is not finite."""
    error = torch.linalg.vector_norm((found - expected).double())
    return float(error / torch.linalg.vector_norm(expected.double()))


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


def _exit_head(folder: Path, device: torch.device, length: int, rows: Rows) -> None:
    """Compares the exit head's logits for the same hidden states."""
    hidden_TD = _reference(folder, length).run(_tokens(folder, length), [length])[0]
    expected_TV = _head_logits(folder, "float32", _CPU, hidden_TD)
    for dtype in _DTYPES:
        found_TV = _head_logits(folder, dtype, device, hidden_TD)
        error = relative_error(found_TV, expected_TV)
        bound = FLOAT32_BOUND if dtype == "float32" else 1e-2
        rows.prove(
            f"exit head, {dtype}", error <= bound, value=error, unit="rel.", detail=f"bound {bound}"
        )


@torch.inference_mode()
def _head_logits(folder: Path, dtype: DType, device: torch.device, hidden_TD: Tensor) -> Tensor:
    num_pages = -(-len(hidden_TD) // PAGE_SIZE)
    head = ExitHead.load(
        folder / "exit_head",
        target=ModelSpec.from_folder(folder),
        target_path=folder,
        dtype=dtype,
        numerics="fast",
        device=device,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
    )
    plan = RowPlan.build(
        [RowSegment(0, len(hidden_TD), PageTable(range(num_pages)))],
        page_size=PAGE_SIZE,
        device=device,
        numerics="fast",
    )
    return head.logits(head.forward(hidden_TD.to(device), plan)).cpu()


def _tokens(folder: Path, length: int) -> Tensor:
    vocab_size = ModelSpec.from_folder(folder).vocab_size
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, vocab_size, (length,), generator=generator)
