"""Times of a round against the bytes that it moves: figures without a verdict, in bfloat16.

For the checked model and a stack of Llama 8B layers with random weights. A floor is the bytes of
weights that have to be read, over the measured bandwidth of a copy.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.benchmark import Timer

from eesd_dist.bench.round_breakdown import ms_per_round, without_prefill
from eesd_dist.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from eesd_dist.engine.local import LocalEngine
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.types import (
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    TokenId,
)
from tests.gpu.conftest import Property
from tests.gpu.shapes import LLAMA_8B, Width
from tests.support.wide_checkpoints import write_wide_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

_PAGE_SIZE = 32
_BYTES = 2
"""Bytes of a bfloat16."""
_TINY = Width(hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=512, vocab=2048)


def seconds_of(run: Callable[[], object], *, budget_s: float = 0.5) -> float:
    """Returns the median time of a call, of calls that the device may overlap with the host's."""
    timer = Timer("run()", globals={"run": run})
    return float(timer.blocked_autorange(min_run_time=budget_s).median)


@pytest.fixture(scope="module")
def copy_rate(device: torch.device, is_small: bool) -> float:
    """Bytes per second, read plus written, of the fastest copy that is larger than the L2 cache."""
    rates = []
    for size in (1 << 26,) if is_small else (1 << 28, 1 << 30):
        source = torch.randint(-(1 << 30), 1 << 30, (size // 4,), device=device, dtype=torch.int32)
        target = torch.empty_like(source)
        rates.append(2 * size / seconds_of(lambda s=source, t=target: t.copy_(s)))
    return max(rates)


def test_copies_and_products(
    device: torch.device, is_small: bool, copy_rate: float, record_property: Property
) -> None:
    record_property("copy, GB/s", round(copy_rate / 1e9, 1))
    width = 512 if is_small else 8192
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    record_property("product, TFLOP/s", round(2 * width**3 / seconds_of(lambda: a @ b) / 1e12, 2))


@pytest.fixture(scope="module", params=["model", "8B layers"])
def folder(
    request: pytest.FixtureRequest,
    model: Path,
    is_small: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    if request.param == "model":
        yield model
        return
    folder = tmp_path_factory.mktemp("stack") / "model"
    width, num_layers = (_TINY, 3) if is_small else (LLAMA_8B, 8)
    write_wide_checkpoint(
        folder,
        num_layers=num_layers,
        hidden_size=width.hidden,
        intermediate_size=width.intermediate,
        vocab_size=width.vocab,
        num_heads=width.heads,
        num_kv_heads=width.kv_heads,
    )
    spec = ModelSpec.from_folder(folder)
    TrainableExitHead.from_target(folder, spec, 1, dtype="bfloat16").save(folder / "exit_head")
    yield folder
    shutil.rmtree(folder)


def test_rounds(
    folder: Path,
    device: torch.device,
    is_small: bool,
    copy_rate: float,
    record_property: Property,
) -> None:
    """Records verify passes and draft steps as the engine measured them when it started, and the
    stages of plain and drafting rounds."""
    context, batches = (40, (1, 2)) if is_small else (256, (1, 8, 32))
    llm = LocalEngine(_config(folder, device, context=context, max_running=batches[-1]))
    cost, width = llm.engine.cost, Width.of(folder)
    assert cost is not None
    num_layers = ModelSpec.from_folder(folder).num_layers - llm.engine.draft_stage.span.last
    floor_s = _BYTES * (num_layers * width.layer_weights + width.vocab * width.hidden) / copy_rate
    for num_rows in (1, 5, 9):
        pass_s = cost.verify_s[num_rows - 1]
        figures = f"{1e3 * pass_s:.3f}, {pass_s / floor_s:.1f} x floor {1e3 * floor_s:.3f}"
        record_property(f"verify({num_rows}), ms", figures)
    record_property("draft step, ms", round(1e3 * cost.draft_step_s, 3))
    for controller in (None, "fixed"):
        for batch in batches:
            rounds: list[RoundStats] = []
            requests = _requests(folder, batch, context, controller, 10 if is_small else 33)
            llm.generate(requests, observe=rounds.append)
            steady = [r for r in without_prefill(rounds) if r.num_requests == batch][1:]
            num_tokens = sum(r.num_emitted for r in steady) / max(len(steady), 1)
            name = f"{controller or 'plain'} rounds of {batch}, ms by stage"
            record_property(name, f"{ms_per_round(steady)}, {num_tokens:.1f} tokens a round")
    llm.close()


def _config(folder: Path, device: torch.device, *, context: int, max_running: int) -> EngineConfig:
    num_pages = (context // _PAGE_SIZE + 4) * max_running
    return EngineConfig(
        model=ModelConfig(
            path=folder, dtype="bfloat16", device="cpu" if device.type == "cpu" else "cuda"
        ),
        cache=CacheConfig(page_size=_PAGE_SIZE, num_pages=num_pages, prefix_caching=False),
        scheduler=SchedulerConfig(
            max_running=max_running, token_budget=4096, prefill_chunk=context
        ),
        speculation=SpeculationConfig(controller="fixed", fixed_length=4, max_draft_tokens=8),
    )


def _requests(
    folder: Path, batch: int, context: int, controller: str | None, max_tokens: int
) -> list[Request]:
    vocab_size = ModelSpec.from_folder(folder).vocab_size
    generator = torch.Generator().manual_seed(3)
    prompts_BL = torch.randint(3, vocab_size, (batch, context), generator=generator)
    is_plain = controller is None
    return [
        Request(
            request_id=RequestId(f"{controller}-{batch}-{at}"),
            prompt=tuple(TokenId(token) for token in prompt_L.tolist()),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            speculation=SpeculationParams(
                mode="off" if is_plain else "auto", controller=controller
            ),
        )
        for at, prompt_L in enumerate(prompts_BL)
    ]
