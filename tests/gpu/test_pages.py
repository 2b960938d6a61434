"""KV pages that stay on the device: from one store to another, and from one process to another."""

from pathlib import Path

import pytest
import torch

from eesd_dist.backends.api import engine_on
from eesd_dist.engine.page_store import PageStore
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.page_wire import chunks_of
from tests.gpu.ranks import move_pages, run_ranks

pytestmark = pytest.mark.gpu

_NUM_PAGES = 24


@torch.inference_mode()
def test_pages_move_between_stores_on_two_streams(model: Path, device: torch.device) -> None:
    """Checks each byte, and that other pages are unchanged."""
    source, target = _store(model, device), _store(model, device)
    leased = list(range(1, _NUM_PAGES, 2))
    reserved = list(reversed(range(0, _NUM_PAGES, 2)))
    generator = torch.Generator().manual_seed(0)
    (whole,) = chunks_of(source.page_bytes, len(leased), max_bytes=1 << 30)
    expected_B = torch.randint(0, 256, (whole.size_bytes,), dtype=torch.uint8, generator=generator)
    source.write(whole, leased, expected_B.to(device))
    source.settle()
    for chunk in chunks_of(source.page_bytes, len(leased), max_bytes=10_000):
        with engine_on(device).own_stream(device):
            content_B = source.read(chunk, leased)
            source.settle()
        with engine_on(device).own_stream(device):
            target.write(chunk, reserved, content_B)
            target.settle()
    assert torch.equal(target.read(whole, reserved).cpu(), expected_B)
    assert not target.read(whole, leased).any()


def test_pages_move_between_ranks_over_nccl(num_gpus: int) -> None:
    run_ranks(move_pages, ["cuda:0", f"cuda:{1 % num_gpus}"])


def test_pages_of_the_device_move_between_ranks_over_links(device: torch.device) -> None:
    run_ranks(move_pages, [f"cpu<-{device}"] * 2)


def _store(model: Path, device: torch.device) -> PageStore:
    span = LlamaSpan.load(
        model,
        ModelSpec.from_folder(model),
        0,
        2,
        group=SingleGroup(),
        dtype="float32",
        numerics="fast",
        device=device,
        num_pages=_NUM_PAGES,
        page_size=16,
    )
    span.paged.begin()
    return PageStore(span)
