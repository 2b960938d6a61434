"""Reads and writes one rank's KV pages as bytes, and describes their layout for a peer rank.

The draft stage has pages for its layers and for the exit head, a verify rank for its share of the
other layers: in both cases a list of layers, each with its own page size. Does not depend on how
the bytes are sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import is_nccl_available

from eesd_dist.backends.api import engine_on
from eesd_dist.config import EngineConfig
from eesd_dist.engine.layout import Layout
from eesd_dist.model.attention.pages import pages_on
from eesd_dist.model.heads.exit_head import ExitHead
from eesd_dist.model.kernels import TORCH_DTYPES, dtype_name
from eesd_dist.model.span import LlamaSpan
from eesd_dist.schedule.page_leases import KvLayout
from eesd_dist.transport.page_wire import Chunk


class PageStore:
    """All paged layers of a process, in order: the span's, the exit head's, and those of a verify
    rank that shares the process."""

    def __init__(
        self, span: LlamaSpan, head: ExitHead | None = None, verify: LlamaSpan | None = None
    ) -> None:
        self._paged = [stack.paged for stack in (span, head, verify) if stack is not None]
        self._layers = [
            (paged, layer) for paged in self._paged for layer in range(len(paged.page_bytes))
        ]
        self.page_bytes = tuple(size for paged in self._paged for size in paged.page_bytes)
        """Bytes of one page, layer by layer."""
        self.device = span.paged.device
        self.weights = span.weights
        """Digest of the target's files that the layers were read from, taken at that time."""

    @torch.inference_mode()
    def read(self, chunk: Chunk, pages: Sequence[int]) -> Tensor:
        """Returns a chunk of these pages, on their device. Rounds may run: they do not write leased
        pages."""
        chunk_pages = pages[chunk.first_page : chunk.last_page]
        return torch.cat(
            [
                paged.read_pages(layer, chunk_pages)
                for paged, layer in self._layers[chunk.first_layer : chunk.last_layer]
            ]
        )

    @torch.inference_mode()
    def write(self, chunk: Chunk, pages: Sequence[int], content_B: Tensor) -> None:
        """Writes a chunk to these pages. Rounds may run: these pages are in no page table. A round
        may read past the end of its pages, into numbers that its mask hides; the bytes of another
        pipeline are finite numbers too, and so is any mixture of old and new ones."""
        chunk_pages = pages[chunk.first_page : chunk.last_page]
        at = 0
        for layer in range(chunk.first_layer, chunk.last_layer):
            paged, own = self._layers[layer]
            end = at + self.page_bytes[layer] * len(chunk_pages)
            paged.write_pages(own, chunk_pages, content_B[at:end])
            at = end

    def settle(self) -> None:
        """Waits until all writes of this thread are visible to later rounds."""
        for paged in self._paged:
            paged.settle_writes()


def kv_layout(config: EngineConfig, layout: Layout, *, weights: str, head: str) -> KvLayout:
    """Returns the properties that a peer rank has to share to exchange pages; `weights` and `head`:
    digests of the loaded target and exit head."""
    kv_dtype = pages_on(layout.device).kv_dtype(
        layout.kv_cache_dtype, compute_dtype=TORCH_DTYPES[layout.dtype]
    )
    return KvLayout(
        weights=f"{config.model.path} ({weights[:16]})",
        head=head,
        dtype=layout.dtype,
        kv_dtype=dtype_name(kv_dtype),
        numerics=config.model.numerics,
        split=layout.split,
        num_layers=layout.spec.num_layers,
        draft_ranks=config.parallel.draft_tensor_parallel_size,
        verify_ranks=config.parallel.verify_tensor_parallel_size,
        page_size=config.cache.page_size,
        machine=machine_of(config, layout),
        finds_prefixes=config.cache.prefix_caching,
        gpu=engine_on(layout.device).uuid(layout.device),
        has_nccl=is_nccl_available(),
    )


def machine_of(config: EngineConfig, layout: Layout) -> str:
    """Returns what decides the last bits of a rank's numbers besides the model."""
    device = layout.device
    machine = engine_on(device).machine(
        device,
        dtype=layout.dtype,
        numerics=config.model.numerics,
        num_threads=config.parallel.num_threads,
    )
    return f"torch {torch.__version__}, {device.type}, {machine}, {pages_on(device).page_form}"
