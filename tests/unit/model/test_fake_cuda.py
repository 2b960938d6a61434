"""The computation of a round on a GPU copies nothing to the host.

Runs without a GPU, on tensors that have a device and no values; `infra/gpu/check.sh` checks values.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from eesd_dist.backends.cuda.drafter import GraphDrafter
from eesd_dist.backends.cuda.steps import _Reading, _Size
from eesd_dist.backends.cuda.tiles import Tiling
from eesd_dist.config import DType
from eesd_dist.engine.page_store import PageStore
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.heads.head_parts import HeadParts
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.sampling.processors import VocabularyShard
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.sampling.rule import draft_choice, first_max, perturbed
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.page_wire import chunks_of
from eesd_dist.types import SamplingParams
from tests.support.fake_cuda import GPU, HostCopies, fake_cuda
from tests.support.tiny_checkpoints import save_tiny_model

BUNDLED = Path(__file__).parents[3] / "serve_app" / "demo_model"
PAGE_SIZE = 16
NUM_PAGES = 4


def plan_of(segment: RowSegment) -> RowPlan:
    return RowPlan.build([segment], page_size=PAGE_SIZE, device=GPU, numerics="invariant")


def span_of(folder: Path, spec: ModelSpec, dtype: DType, *, last: int | None = None) -> LlamaSpan:
    """Loads a span without the self-check of `invariant`, which needs values."""
    return LlamaSpan.load(
        folder,
        spec,
        0,
        spec.num_layers if last is None else last,
        group=SingleGroup(),
        dtype=dtype,
        numerics="fast",
        device=GPU,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
    )


def head_of(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ExitHead]:
    """Returns what loads the bundled head. Its files are read before, since checking them needs
    their values."""
    folder = BUNDLED / "exit_head"
    parameters = HeadParts.read(folder, target=spec, target_path=BUNDLED, dtype=torch.bfloat16)
    monkeypatch.setattr(HeadParts, "read", lambda *_, **__: parameters)
    return partial(
        ExitHead.load,
        folder,
        target=spec,
        target_path=BUNDLED,
        dtype="bfloat16",
        numerics="fast",
        device=GPU,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    ["llama", "llama, biases", "mistral, sliding window", "qwen3", "gemma3", "granite", "olmo2"],
)
def test_a_span_and_its_logits_stay_on_the_gpu(tmp_path: Path, family: str, dtype: DType) -> None:
    save_tiny_model(tmp_path, family)
    spec = ModelSpec.from_folder(tmp_path)
    with fake_cuda():
        span = span_of(tmp_path, spec, dtype)
        tokens_T = torch.arange(25, device=GPU)
        with HostCopies() as copies, torch.inference_mode():
            rows = plan_of(RowSegment(20, 25, (1, 2, 3)))
            logits_TV = span.logits(span.forward(span.embed(tokens_T), rows))
        assert (logits_TV.device, logits_TV.shape) == (GPU, (25, 96))
        assert copies.num_operators > 50
        assert copies.to_the_host == []


def test_migrated_pages_stay_on_the_gpu(tmp_path: Path) -> None:
    """Only a group on the CPU takes them through the host."""
    save_tiny_model(tmp_path, "llama")
    spec = ModelSpec.from_folder(tmp_path)
    with fake_cuda():
        store = PageStore(span_of(tmp_path, spec, "bfloat16"))
        (chunk,) = chunks_of(store.page_bytes, 2)
        with HostCopies() as copies:
            content_B = store.read(chunk, [1, 3])
            store.write(chunk, [0, 2], content_B)
        assert (store.device, content_B.device, len(content_B)) == (GPU, GPU, chunk.size_bytes)
        assert copies.num_operators > 2 * spec.num_layers
        assert copies.to_the_host == []


def test_an_exit_head_stays_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.from_folder(BUNDLED)
    load_head = head_of(spec, monkeypatch)
    with fake_cuda():
        head = load_head()
        hidden_TD = torch.zeros(3, spec.hidden_size, device=GPU, dtype=torch.bfloat16)
        with HostCopies() as copies, torch.inference_mode():
            rows = plan_of(RowSegment(20, 3, (1, 2)))
            logits_TV = head.logits(head.forward(hidden_TD, rows))
        assert logits_TV.device == GPU
        assert copies.to_the_host == []


@pytest.mark.parametrize("reading", list(_Reading))
@pytest.mark.parametrize("tiling", [Tiling(8, 4), Tiling(8, 4, num_splits=4, split_blocks=1)])
def test_a_step_of_drafting_stays_on_the_gpu(
    reading: _Reading, tiling: Tiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph captures: a copy to the host cannot be."""
    spec = ModelSpec.from_folder(BUNDLED)
    load_head = head_of(spec, monkeypatch)
    with fake_cuda():
        head = load_head()
        span = span_of(BUNDLED, spec, "bfloat16", last=1)
        drafter = GraphDrafter.of(span, head)
        assert drafter is not None
        with HostCopies() as copies, torch.inference_mode():
            hidden_TD, best_G4 = drafter._steps._step(_Size(8, reading, tiling, tiling))
        assert hidden_TD.shape == (8, spec.hidden_size)
        assert best_G4.shape == ((8, 4) if reading is not _Reading.NOTHING else (8,))
        assert copies.num_operators > 10
        assert copies.to_the_host == []


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=5),
        SamplingParams(temperature=0.8, min_p=0.1),
    ],
    ids=["greedy", "noise", "top_k", "min_p"],
)
def test_the_rule_stays_on_the_gpu(params: SamplingParams) -> None:
    rules = [RowRule.of(params, position=at, num_prompt=1) for at in range(4)]
    with fake_cuda():
        logits_SV = torch.zeros(4, 500, device=GPU)
        with HostCopies() as copies, torch.inference_mode():
            chosen_S = first_max(perturbed(logits_SV, rules, VocabularyShard(start=0, size=500)))
            drafted = draft_choice(logits_SV, rules, width=2)
        assert chosen_S.device == drafted.tokens.device == drafted.gaps.device == GPU
        assert copies.to_the_host == []


def test_a_copy_to_the_host_is_seen() -> None:
    with fake_cuda():
        x = torch.zeros(4, device=GPU)
        with HostCopies() as copies, torch.inference_mode():
            x[1:3].cpu()
        assert len(copies.to_the_host) == 1
