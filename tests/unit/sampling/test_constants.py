"""CPU constants together with GPU tensors: torch's own table gives the operators that allow it.

A CUDA build checks that the tensors of a call are on one device, except for these operators; a
build for the CPU and fake tensors accept every mixture.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor

from eesd_dist.sampling.elementary import mass_of, neg_log
from eesd_dist.sampling.noise import gumbel
from eesd_dist.sampling.processors import VocabularyShard, processed
from eesd_dist.sampling.row_rules import RowRule
from eesd_dist.types import SamplingParams
from tests.support.operators import OperatorWatch


def operators_that_take_any_device() -> set[str]:
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(table.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {
        entry["func"].split("(")[0] for entry in entries if entry.get("device_check") == "NoCheck"
    }


class Constants(OperatorWatch):
    """Operators that received a constant (a zero-dimensional tensor) with other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def saw(
        self, operator: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        if len({x.dim() > 0 for x in inputs}) == 2:
            self.found.add(str(operator).removeprefix("aten.").removesuffix(".default"))


def work() -> None:
    gumbel([1, 2], torch.arange(100))
    neg_log(torch.rand(10) + 0.1)
    mass_of(-torch.rand(10))
    params = SamplingParams(
        temperature=0.7,
        top_p=0.8,
        top_k=200,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        logit_bias=((3, 1.0),),
    )
    rules = [RowRule.of(params, position=9, num_prompt=4, history=range(9)) for _ in range(3)]
    for width in (100, 20_000):  # rows that are sorted, and rows that are searched
        processed(torch.randn(3, width), rules, VocabularyShard(start=0, size=width))


def test_constants_stand_only_where_a_gpu_takes_them() -> None:
    with Constants() as constants:
        work()
    assert len(constants.found) > 5, "the constants are tensors"
    assert constants.found <= operators_that_take_any_device()


@pytest.mark.parametrize("act", [torch.clamp_min, torch.clamp_max])
def test_an_operator_that_refuses_them_is_seen(act: Callable[..., Tensor]) -> None:
    with Constants() as constants:
        act(torch.rand(3), torch.tensor(0.5))
    assert not constants.found <= operators_that_take_any_device()
