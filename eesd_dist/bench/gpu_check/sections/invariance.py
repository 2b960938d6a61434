"""`numerics: invariant` on this device: every product shape, and attention at long contexts."""

from collections.abc import Mapping

import torch

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.sections.attending import AttentionShape, first_difference
from eesd_dist.bench.gpu_check.sections.products import ProductFinding
from eesd_dist.bench.gpu_check.sections.products import examine as examine_product
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.bench.gpu_check.shapes import LARGE, Width
from eesd_dist.config import DType
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.kernels import LinearPacker
from eesd_dist.model.spec import ModelSpec

_DTYPES: tuple[DType, ...] = ("bfloat16", "float32")


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    spec = ModelSpec.from_folder(setting.model)
    widths = {"bundled": Width.of(spec)}
    if not setting.is_small:
        widths |= LARGE
    for dtype in _DTYPES:
        for name, width in widths.items():
            products = width.products
            if name == "bundled":
                products |= _exit_head_products(setting, spec)
            num_rows = 40 if setting.is_small else 400
            findings = {
                part: examine_product(*shape, dtype=dtype, device=device, num_rows=num_rows)
                for part, shape in products.items()
            }
            _report_products(f"products, {name}, {dtype}", findings, rows)
        for name, width in widths.items():
            _attention(setting, name, width, dtype, device, rows)
    if setting.is_small:
        rows.cannot("Llama 8B and 70B TP8 shapes", "needs cuda")


def _exit_head_products(setting: Setting, spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Returns products of the exit head with shapes that the target's layers do not have."""
    folder = setting.model / "exit_head"
    if not folder.is_dir():
        return {}
    config = HeadConfig.read(folder, target=spec, target_path=setting.model)
    return {"draft_head": (config.draft_vocab_size, spec.hidden_size)}


def _report_products(name: str, findings: Mapping[str, ProductFinding], rows: Rows) -> None:
    """Reports one row for a model's products, failures first."""
    bad = {part: f for part, f in findings.items() if not f.taken_holds}
    told = [f"{part}: {f.reason}" for part, f in bad.items()]
    by_candidate: dict[str, list[str]] = {}
    for part, finding in findings.items():
        by_candidate.setdefault(" or ".join(finding.holding) or "none", []).append(part)
    told += [f"{names} holds for {', '.join(parts)}" for names, parts in by_candidate.items()]
    told += [f"{part}: {text}" for part, f in findings.items() for text in f.failing]
    rows.prove(
        name,
        not bad,
        value=f"{len(findings) - len(bad)} of {len(findings)}",
        unit="shapes",
        detail="; ".join(told),
    )


def _attention(
    setting: Setting, name: str, width: Width, dtype: DType, device: torch.device, rows: Rows
) -> None:
    packer = LinearPacker(dtype=dtype, numerics="invariant", device=device)
    lengths = (300,) if setting.is_small else (300, 4096, 16_384)
    difference = first_difference(
        AttentionShape(
            num_kv_heads=width.kv_heads,
            queries_per_kv=width.heads // width.kv_heads,
            head_dim=width.head_dim,
        ),
        dtype=packer.compute_dtype,
        device=device,
        lengths=lengths,
    )
    rows.prove(
        f"attention, {name}, {dtype}",
        difference is None,
        detail=f"contexts {', '.join(map(str, lengths))}"
        if difference is None
        else f"differs: {difference}",
    )
