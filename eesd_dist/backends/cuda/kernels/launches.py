"""Programmatic dependent launch: a kernel starts while the one before it ends (Hopper and later).

A kernel lets the next one start, does what does not depend on the one before it, and waits for that
one before it reads or writes anything that kernels change. Every kernel waits, so that what ran
before the previous kernel has ended too.
"""

from functools import cache
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def launch_next() -> None:
    gdc_launch_dependents()


@triton.jit
def wait_for_previous() -> None:
    gdc_wait()


@cache
def is_hopper(device: torch.device) -> bool:
    """True for a GPU with dependent launches, a tensor memory accelerator and 227 KiB of shared
    memory a program: compute capability 9 and 10. That of 12 has 99 KiB, too few for the tiles."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Returns the options of a launch on this device, and what tells the kernel about it."""
    if is_hopper(device):
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}
