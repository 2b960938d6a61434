"""An ingress and a pipeline replica import no torch."""

import subprocess
import sys

import pytest

_INGRESS = """
import sys
import serve_app.ingress.deployment
from eesd_dist.model.max_len import max_model_len_of
from eesd_dist.text.tokenizer import Tokenizer, leave_out_torch
from serve_app.config import service_config
from eesd_dist.bundled_model import BUNDLED_MODEL

config = service_config({"engine": {"model": {"path": str(BUNDLED_MODEL)}}})
leave_out_torch()
tokenizer = Tokenizer.load(BUNDLED_MODEL)
assert tokenizer.encode_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
assert max_model_len_of(config.engine) > 1000
assert "torch" not in sys.modules
leave_out_torch()  # a second time there is nothing to do
import torch
"""
_PIPELINE = """
import sys
import serve_app.pipeline.deployment
import serve_app.router.calls
from serve_app.config import service_config
from eesd_dist.bundled_model import BUNDLED_MODEL
from serve_app.pipeline.stage_factory import stages_of

stages_of(service_config({"engine": {"model": {"path": str(BUNDLED_MODEL)}}}))
assert "torch" not in sys.modules
assert "transformers" not in sys.modules
"""


@pytest.mark.parametrize("program", [_INGRESS, _PIPELINE], ids=["ingress", "pipeline"])
def test_a_process_without_a_model_imports_no_torch(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PyTorch was not found" not in done.stderr
