"""Texts on the device: the fuzz compares random engines and requests with plain decoding."""

import json
from pathlib import Path

import pytest
import torch

from eesd_dist.bench.fuzz.command import main
from eesd_dist.bench.options import FuzzOptions
from eesd_dist.config import DType
from tests.gpu.conftest import Property

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_texts_are_those_of_plain_decoding(
    dtype: DType,
    drafting_model: Path,
    device: torch.device,
    is_small: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Property,
) -> None:
    options = FuzzOptions(
        random=1,
        model=(drafting_model,),
        device="cpu" if device.type == "cpu" else "cuda",
        dtype=(dtype,),
        tokens=100 if is_small else 20_000,
        minutes=0.6,
        max_failures=1,
        case_folder=tmp_path,
        json=True,
    )
    status = main(options)
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    record_property("tokens", report["tokens"])
    assert report["mismatches"] == 0, report["failures"]
    assert report["tokens"] > 0
    assert status == 0
