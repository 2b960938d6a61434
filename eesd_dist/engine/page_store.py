"""One rank's KV pages as bytes, and whether another pipeline's may be had for them.

The draft stage keeps pages for its layers and for the exit head, a verify rank for its share of
the others: a list of layers either way, each with pages of its own size. Knows nothing of who is
on the other side.
"""

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import Layout
from eesd_dist.model.exit_head import ExitHead
from eesd_dist.model.span import LlamaSpan
from eesd_dist.schedule.page_leases import KvLayout
from eesd_dist.transport.page_wire import Chunk

_CPU_INFO = Path("/proc/cpuinfo")


class PageStore:
    """All paged layers of a rank, in order: the span's, then the exit head's."""

    def __init__(self, span: LlamaSpan, head: ExitHead | None = None) -> None:
        self._parts = [span.paged] if head is None else [span.paged, head.paged]
        self._layers = [
            (part, layer) for part in self._parts for layer in range(len(part.page_bytes))
        ]
        self.page_bytes = tuple(size for part in self._parts for size in part.page_bytes)
        """Bytes of one page, layer by layer."""
        self.weights = span.weights
        """Digest of the files that they are computed with, as these were when they were read."""

    @torch.inference_mode()
    def read(self, chunk: Chunk, pages: Sequence[int]) -> Tensor:
        """A chunk of these pages. Rounds may go on: they write no page that is leased."""
        wanted = pages[chunk.first_page : chunk.last_page]
        return torch.cat(
            [
                part.read_pages(layer, wanted)
                for part, layer in self._layers[chunk.first_layer : chunk.last_layer]
            ]
        )

    @torch.inference_mode()
    def write(self, chunk: Chunk, pages: Sequence[int], content_B: Tensor) -> None:
        """Rounds may go on: no table has these pages. A round may read across the end of its own
        pages, into numbers that its mask then multiplies by nothing; bytes that another pipeline
        computed with are finite numbers too, and so is any mixture of whole old and new ones."""
        wanted = pages[chunk.first_page : chunk.last_page]
        at = 0
        for layer in range(chunk.first_layer, chunk.last_layer):
            part, own = self._layers[layer]
            end = at + self.page_bytes[layer] * len(wanted)
            part.write_pages(own, wanted, content_B[at:end])
            at = end

    def settle(self) -> None:
        """Returns when all that was written is there for the rounds to come."""
        for part in self._parts:
            part.settle_writes()


def kv_layout(config: EngineConfig, layout: Layout, *, weights: str, head: str) -> KvLayout:
    """What a rank's like in another pipeline has to agree in; `weights` and `head` are digests of
    what was loaded, of the target and of the exit head that drafts."""
    return KvLayout(
        weights=f"{config.model.path} ({weights[:16]})",
        head=head,
        dtype=layout.dtype,
        numerics=config.model.numerics,
        split=layout.split,
        num_layers=layout.spec.num_layers,
        draft_ranks=config.parallel.draft_tensor_parallel_size,
        verify_ranks=config.parallel.verify_tensor_parallel_size,
        page_size=config.cache.page_size,
        machine=_machine(layout.device, num_threads=config.parallel.num_threads),
        finds_prefixes=config.cache.prefix_caching,
    )


def _machine(device: torch.device, *, num_threads: int) -> str:
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        kind = f"{_cpu_model()}, {capability}, {num_threads} threads"
    return f"torch {torch.__version__}, {device.type}, {kind}"


def _cpu_model() -> str:
    """Linear algebra libraries choose their routines by it."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
