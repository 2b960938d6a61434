"""Measures the parts of a round, against the bytes they move and against transformers.

For the bundled model and a stack of Llama 8B layers with random weights, in bfloat16: verify passes
of 1 to 9 rows, draft steps, plain and drafting rounds of 1, 8 and 32 requests, and transformers'
decoding of the same checkpoint. A floor is the bytes of weights and keys that have to be read, over
the measured bandwidth of a copy. These rows are measurements without a verdict.
"""

import gc
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eesd_dist.bench.gpu_check.checkpoints import drawn_on, write_stack
from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.sections.timer import copy_rates, synchronize, time_of
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.bench.gpu_check.shapes import LLAMA_8B, Width
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Numerics,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.build import build_verify_stage
from eesd_dist.engine.local import LocalEngine
from eesd_dist.engine.profile import greedy_segment
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.errors import ConfigError
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.contracts import RoundHeader, Segment
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.types import (
    PageId,
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    TokenId,
)

_PAGE_SIZE = 32
_DRAFT_LENGTH = 4
_BYTES = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Settings for timing one checkpoint."""

    name: str
    folder: Path
    numerics: Numerics
    device: torch.device
    copy_rate: float
    """Bytes per second, read plus written."""
    context: int
    """Tokens before the timed rows."""
    verify_rows: Sequence[int]
    batches: tuple[int, ...]
    max_tokens: int
    point_s: float
    """Approximate time for one figure."""

    def config(self) -> EngineConfig:
        pages_each = -(-(self.context + self.max_tokens + 16) // _PAGE_SIZE) + 1
        return EngineConfig(
            model=ModelConfig(
                path=self.folder,
                dtype="bfloat16",
                numerics=self.numerics,
                device="cuda" if self.device.type == "cuda" else "cpu",
            ),
            cache=CacheConfig(
                page_size=_PAGE_SIZE,
                num_pages=pages_each * max(self.batches),
                prefix_caching=False,
            ),
            scheduler=SchedulerConfig(
                max_running=max(self.batches), token_budget=4096, prefill_chunk=self.context
            ),
            speculation=SpeculationConfig(
                controller="fixed", fixed_length=_DRAFT_LENGTH, max_draft_tokens=8
            ),
        )

    def floor_s(self, num_bytes: float) -> float:
        return num_bytes / self.copy_rate


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    copy_rate = max(copy_rates(device, budget_s=min(4.0, setting.left_s / 10)).values())
    small = setting.is_small

    def bench(name: str, folder: Path) -> None:
        _time_checkpoint(
            _Bench(
                name=name,
                folder=folder,
                numerics="invariant",
                device=device,
                copy_rate=copy_rate,
                context=40 if small else 256,
                verify_rows=(1, 5, 9) if small else range(1, 10),
                batches=(1, 2) if small else (1, 8, 32),
                max_tokens=10 if small else 33,
                point_s=0.02 if small else min(0.5, setting.left_s / 100),
            ),
            rows,
        )
        gc.collect()

    bench("bundled", setting.model)
    width, num_layers = _stack_size(setting, device)
    folder = setting.scratch / "stack"
    write_stack(
        folder,
        num_layers=num_layers,
        hidden_size=width.hidden,
        intermediate_size=width.intermediate,
        vocab_size=width.vocab,
        num_heads=width.heads,
        num_kv_heads=width.kv_heads,
        draw=drawn_on(device),
    )
    spec = ModelSpec.from_folder(folder)
    TrainableExitHead.from_target(folder, spec, 1, dtype="bfloat16").save(folder / "exit_head")
    size_gb = num_layers * width.layer_weights * _BYTES / 1e9
    rows.measure(
        f"weights of {num_layers} layers", size_gb, "GB", detail=f"copy {copy_rate / 1e9:.0f} GB/s"
    )
    bench(f"{num_layers} x {'small' if small else 'Llama 8B'}", folder)


def _stack_size(setting: Setting, device: torch.device) -> tuple[Width, int]:
    """Returns the width and number of layers that memory, disk and time allow, up to eight."""
    if setting.is_small:
        tiny = Width(hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=512, vocab=2048)
        return tiny, 3
    layer = LLAMA_8B.layer_weights * _BYTES
    head = LLAMA_8B.head_weights * _BYTES
    on_disk = shutil.disk_usage(setting.scratch).free * 0.8 - 3 * head
    on_device = torch.cuda.mem_get_info(device)[0] * 0.8 - 4 * head
    return LLAMA_8B, int(max(2, min(8, on_disk // layer, on_device // layer)))


def _time_checkpoint(bench: _Bench, rows: Rows) -> None:
    spec = ModelSpec.from_folder(bench.folder)
    try:
        stage = build_verify_stage(bench.config(), SingleGroup())
    except ConfigError:  # this machine refuses `invariant`: measure `fast` instead
        bench = replace(bench, numerics="fast")
        stage = build_verify_stage(bench.config(), SingleGroup())
    for num_rows in bench.verify_rows:
        _verify(bench, spec, stage, num_rows, rows)
    del stage
    llm = LocalEngine(bench.config())
    try:
        _draft_steps(bench, spec, llm, rows)
        for drafting in (False, True):
            for batch in bench.batches:
                _rounds(bench, spec, llm, batch, drafting=drafting, rows=rows)
    finally:
        llm.close()
    del llm
    gc.collect()
    _transformers(bench, spec, rows)


def _verify(bench: _Bench, spec: ModelSpec, stage: VerifyStage, num_rows: int, rows: Rows) -> None:
    """Times a whole verify pass, and its spans alone, on the device and on the host."""
    segment = _segment(bench.context, num_rows)
    header = RoundHeader(epoch=0, round_id=0, segments=(segment,))
    span, device = stage.span, bench.device
    hidden_TD = torch.randn(num_rows, spec.hidden_size, device=device).to(span.compute_dtype)

    @torch.inference_mode()
    def layers_and_head() -> Tensor:
        plan = RowPlan.build(
            [RowSegment(segment.start, num_rows, segment.pages)],
            page_size=_PAGE_SIZE,
            device=device,
            numerics=bench.numerics,
        )
        return span.logits(span.forward(hidden_TD, plan))

    whole = time_of(lambda: stage.verify(header, hidden_TD, None), device, budget_s=bench.point_s)
    part = time_of(layers_and_head, device, budget_s=bench.point_s)
    floor_s = bench.floor_s(_span_bytes(span.last - span.first, spec, bench.context))
    rows.measure(
        f"{bench.name}, verify({num_rows})",
        whole.device_ms,
        "ms",
        detail=f"{whole.device_s / floor_s:.1f} x floor {1e3 * floor_s:.3f}; layers "
        f"{part.device_ms:.3f}, queued in {1e3 * part.host_s:.3f} ms, {bench.numerics}",
    )


def _draft_steps(bench: _Bench, spec: ModelSpec, llm: LocalEngine, rows: Rows) -> None:
    """Reports draft steps as the engine measured them for its controllers."""
    cost, head = llm.engine.cost, llm.engine.draft_stage.head
    if cost is None or head is None:
        return
    by_batch = {1: cost.draft_step_s, **dict(cost.draft_rows_s)}
    told = ", ".join(f"batch {batch} {1e3 * each:.2f}" for batch, each in by_batch.items())
    rows.measure(f"{bench.name}, draft step", 1e3 * cost.draft_step_s, "ms", detail=told)


def _rounds(
    bench: _Bench, spec: ModelSpec, llm: LocalEngine, batch: int, *, drafting: bool, rows: Rows
) -> None:
    """Times decoding rounds by the parts of the engine's loop; the rest is host time."""
    what = f"drafting {_DRAFT_LENGTH}" if drafting else "plain"
    seen: list[RoundStats] = []
    requests = [_request(bench, spec, at, batch, drafting=drafting) for at in range(batch)]
    generations = llm.generate(requests, observe=seen.append)
    steady = [r for r in seen if r.num_requests == batch and r.num_prefill_rows == 0][1:]
    if not steady:
        rows.measure(f"{bench.name}, {what}, batch {batch}", "no steady rounds")
        return
    whole = statistics.median(r.total_s + r.other_s for r in steady)
    draft, verify = (
        statistics.median(getattr(r, f"{part}_s") for r in steady) for part in ("draft", "verify")
    )
    floor_s = bench.floor_s(_span_bytes(spec.num_layers, spec, batch * bench.context))
    emitted = sum(r.num_emitted for r in steady) / len(steady)
    rows.measure(
        f"{bench.name}, {what}, batch {batch}",
        1e3 * whole,
        "ms",
        detail=f"draft {1e3 * draft:.2f}, verify {1e3 * verify:.2f}, "
        f"host {1e3 * (whole - draft - verify):.2f} ms; {emitted / whole:.0f} tokens/s, "
        + (
            f"{emitted / batch:.2f} tokens a round"
            if drafting
            else f"{whole / floor_s:.1f} x floor {1e3 * floor_s:.3f} ms"
        ),
    )
    assert all(generation.tokens for generation in generations)


def _transformers(bench: _Bench, spec: ModelSpec, rows: Rows) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        bench.folder, dtype=torch.bfloat16, local_files_only=True
    )
    model = model.eval().to(bench.device)
    for batch in bench.batches:
        prompt_BL = _prompts(bench, spec, batch).to(bench.device)
        took: dict[int, float] = {}
        for length in (1, bench.max_tokens):
            took[length] = _generating_s(model.generate, prompt_BL, length, bench.device)
        each_s = (took[bench.max_tokens] - took[1]) / (bench.max_tokens - 1)
        rows.measure(
            f"{bench.name}, transformers, batch {batch}",
            1e3 * each_s,
            "ms",
            detail=f"{batch / each_s:.0f} tokens/s, generate with its cache",
        )


def _generating_s(
    generate: Callable[..., Tensor], prompt_BL: Tensor, length: int, device: torch.device
) -> float:
    decode = partial(
        generate,
        prompt_BL,
        attention_mask=torch.ones_like(prompt_BL),
        do_sample=False,
        min_new_tokens=length,
        max_new_tokens=length,
        pad_token_id=0,
    )

    def once() -> None:
        decode()
        synchronize(device)

    return time_of(once, device, budget_s=0.0, warm_ups=1, fewest=3).device_s


def _span_bytes(num_layers: int, spec: ModelSpec, num_keys: int) -> float:
    """Returns the bytes of these layers' and the LM head's weights, and of all keys and values."""
    width = Width.of(spec)
    keys = 2 * spec.num_kv_heads * spec.head_dim * num_keys * num_layers
    return _BYTES * (num_layers * width.layer_weights + width.head_weights + keys)


def _prompts(bench: _Bench, spec: ModelSpec, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, spec.vocab_size, (batch, bench.context), generator=generator)


def _request(bench: _Bench, spec: ModelSpec, at: int, batch: int, *, drafting: bool) -> Request:
    prompt = tuple(TokenId(token) for token in _prompts(bench, spec, batch)[at].tolist())
    drafted = SpeculationParams(controller="fixed")
    return Request(
        request_id=RequestId(f"{drafting}-{batch}-{at}"),
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=bench.max_tokens),
        speculation=drafted if drafting else SpeculationParams(mode="off"),
    )


def _segment(start: int, num_rows: int) -> Segment:
    pages = tuple(PageId(page) for page in range(-(-(start + num_rows) // _PAGE_SIZE)))
    return greedy_segment(start=start, num_rows=num_rows, pages=pages)
