"""KV pages that stay on the device: from one store to another, and from one process to another.

NCCL needs a GPU for each rank: for two ranks on one GPU the row has its error message, and pages
between two streams of one process stand for them.
"""

import torch

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.sections.nccl import seconds_for, together
from eesd_dist.bench.gpu_check.sections.ranks import run_ranks
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.engine.page_store import PageStore
from eesd_dist.model.span import LlamaSpan
from eesd_dist.model.spec import ModelSpec
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.page_wire import chunks_of
from eesd_dist.workers.page_moves import own_stream

_NUM_PAGES = 24
_PAGE_SIZE = 16


def run(setting: Setting, rows: Rows) -> None:
    device = setting.device()
    rows.prove(f"pages from one store on {device} to another", _between_streams(setting, device))
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus:
        devices = ["cuda:0", f"cuda:{1 % num_gpus}"]
        reports = run_ranks("pages", devices, seconds=seconds_for(setting))
        name = f"pages over NCCL, {' to '.join(devices)}"
        together(name, reports, rows, refusable=num_gpus == 1, proven="every byte is there")
    else:
        rows.cannot("pages over NCCL", "needs cuda")
    lies = f"cpu<-{device}"
    reports = run_ranks("pages", [lies, lies], seconds=seconds_for(setting))
    name = f"pages over Gloo, from {device} to {device}"
    together(name, reports, rows, refusable=False, proven="every byte is there")


@torch.inference_mode()
def _between_streams(setting: Setting, device: torch.device) -> bool:
    """Reads pages on one stream and writes them on another; checks each byte, and that other pages
    are unchanged."""
    source, target = _store(setting, device), _store(setting, device)
    leased = list(range(1, _NUM_PAGES, 2))
    here = list(reversed(range(0, _NUM_PAGES, 2)))
    generator = torch.Generator().manual_seed(0)
    (whole,) = chunks_of(source.page_bytes, len(leased), max_bytes=1 << 30)
    sent_B = torch.randint(0, 256, (whole.size_bytes,), dtype=torch.uint8, generator=generator)
    source.write(whole, leased, sent_B.to(device))
    source.settle()
    for chunk in chunks_of(source.page_bytes, len(leased), max_bytes=10_000):
        with own_stream(device):
            content_B = source.read(chunk, leased)
            source.settle()
        with own_stream(device):
            target.write(chunk, here, content_B)
            target.settle()
    arrived = torch.equal(target.read(whole, here).cpu(), sent_B)
    return arrived and not target.read(whole, leased).any()


def _store(setting: Setting, device: torch.device) -> PageStore:
    spec = ModelSpec.from_folder(setting.model)
    span = LlamaSpan.load(
        setting.model,
        spec,
        0,
        2,
        group=SingleGroup(),
        dtype="float32",
        numerics="fast",
        device=device,
        num_pages=_NUM_PAGES,
        page_size=_PAGE_SIZE,
    )
    span.paged.begin()
    return PageStore(span)
