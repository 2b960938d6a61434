"""Inputs that the sections of `eesd bench control` read from its options."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from eesd_dist.bench.options import ControlOptions
from eesd_dist.config import ModelConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.layout import Layout
from eesd_dist.errors import ConfigError

PAGE_SIZE = 32


def model_config_of(options: ControlOptions) -> ModelConfig:
    return ModelConfig(
        path=options.model,
        head=options.head,
        dtype=options.dtype,
        numerics="invariant",
        device=options.device,
    )


def head_of(options: ControlOptions, layout: Layout) -> Path:
    """Returns the folder of the exit head. Raises ConfigError without one."""
    if layout.head_folder is None:
        raise ConfigError(
            f"{options.model}: found no exit head, without which nothing is drafted: use --head"
        )
    return layout.head_folder


def clock_of(options: ControlOptions, device: torch.device) -> Callable[[], float]:
    """Returns the clock. Raises ConfigError if it does not measure what the device does."""
    if options.clock == "wall":
        return time.perf_counter
    if device.type != "cpu":
        raise ConfigError(f"--clock cpu does not measure work on {device}: use --clock wall")
    return time.process_time


def cost_of(options: ControlOptions) -> CostModel | None:
    """Returns the cost model of --cost; None: it is measured."""
    return None if options.cost is None else CostModel.load(options.cost)
