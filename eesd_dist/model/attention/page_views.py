"""Views of the keys and of the values in the pages of one layer."""

from torch import Tensor

from eesd_dist.model.kv_layout import PageForm, key_width, value_width


# Shapes: P pages, K KV heads, X numbers of a page's part, E channels of a head, S slots of a page.
def keys_in(pages_PKX: Tensor, *, head_dim: int, page_size: int, form: PageForm) -> Tensor:
    """Returns [P, K, E, S], without the padding of the slots."""
    if form == "keys by slot":
        keys_PKX = pages_PKX.narrow(2, 0, head_dim * page_size)
        return keys_PKX.view(*pages_PKX.shape[:2], page_size, head_dim).transpose(2, 3)
    width = key_width(page_size)
    keys_PKX = pages_PKX.narrow(2, 0, head_dim * width)
    return keys_PKX.view(*pages_PKX.shape[:2], head_dim, width).narrow(3, 0, page_size)


def values_in(pages_PKX: Tensor, *, head_dim: int, page_size: int) -> Tensor:
    """Returns [P, K, S, E], without the padding of the channels."""
    width = value_width(head_dim)
    values_PKX = pages_PKX.narrow(2, pages_PKX.shape[2] - page_size * width, page_size * width)
    return values_PKX.view(*pages_PKX.shape[:2], page_size, width).narrow(3, 0, head_dim)
