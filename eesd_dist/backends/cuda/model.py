"""Layers on a GPU: kernels in the order of `DecoderLayer.forward`, kept as CUDA graphs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_dist.backends.cuda.attention import CudaAttention
from eesd_dist.backends.cuda.layers import CudaLayers
from eesd_dist.backends.cuda.product import TiledProduct
from eesd_dist.backends.cuda.rows import normed
from eesd_dist.backends.torch.model import TorchModel
from eesd_dist.config import DType, Numerics
from eesd_dist.model.attention.pages import Attention
from eesd_dist.model.attention_shape import AttentionShape
from eesd_dist.model.kernels import TORCH_DTYPES, Candidate, in_row_tiles, plain_linear
from eesd_dist.model.kv_layout import PageForm
from eesd_dist.model.layers.norms import RmsNorm
from eesd_dist.model.layers.paged_layers import LayerStack

_TILE_ROWS = 16
_NATIVE = Candidate("library", plain_linear)
_NATIVE_TILED = Candidate(
    f"library in tiles of {_TILE_ROWS} rows",
    in_row_tiles(plain_linear, tile_rows=_TILE_ROWS),
    has_few_tilings=True,
)
"""Calls the library with tiles of one row count only."""
_TRITON = Candidate("Triton", TiledProduct, has_few_tilings=True)


# Shapes: T rows, D hidden channels.
class CudaModel(TorchModel):
    """Implements the protocols of `model`."""

    page_form: PageForm = "keys by slot"

    def candidates(
        self, dtype: DType, numerics: Numerics
    ) -> tuple[Sequence[Candidate], torch.dtype]:
        if numerics == "fast":
            return (_NATIVE,), TORCH_DTYPES[dtype]
        candidates = (_NATIVE_TILED,) if dtype == "float32" else (_TRITON, _NATIVE_TILED)
        return candidates, TORCH_DTYPES[dtype]

    def normed(self, norm: RmsNorm, x_TD: Tensor) -> Tensor:
        return normed(norm, x_TD.contiguous(), None)

    def attention(self, pages_PKX: Tensor, shape: AttentionShape) -> Attention:
        return CudaAttention(pages_PKX, shape)

    def fused_layers(self, stack: LayerStack) -> CudaLayers | None:
        if not stack.layers:
            return None
        return CudaLayers(
            stack.layers,
            stack.pages,
            stack.rotations,
            hidden_size=stack.hidden_size,
            dtype=stack.dtype,
        )

    def settle(self, device: torch.device) -> None:
        """Waits for this thread's stream: rounds may run on another one."""
        torch.cuda.current_stream(device).synchronize()
