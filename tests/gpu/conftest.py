"""Device, checkpoints and report of the tests that need a GPU.

    python -m pytest tests/gpu -m gpu [--device cpu] [--model FOLDER] [--junitxml FILE]

They need torch and Triton, and neither Ray nor Numba. `--device cpu` runs them at small sizes,
which shows that the checks themselves work. The XML has the machine's versions as a line of JSON,
and the figures of each test as its properties.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.engine.layout import device_named
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.provenance import collect_provenance
from tests.gpu.shapes import LLAMA_8B, LLAMA_70B_TP8, Width
from tests.support.tiny_checkpoints import save_tiny_model

Property = Callable[[str, object], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes")
    parser.addoption("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint (bundled model)")


def pytest_report_header() -> list[str]:
    return collect_provenance(seed=0).lines()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the figures that tests recorded, in less than 12,000 characters."""
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, figures in report.user_properties:
            test = re.sub(r".*/test_(\w+)\.py::\w+", r"\1", report.nodeid)
            terminalreporter.write_line(f"{test} {name}: {figures}")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Returns the device. Raises ConfigError where there is no GPU, unless it is `--device cpu`."""
    return device_named(pytestconfig.getoption("--device", "cuda"))


@pytest.fixture(scope="session")
def is_small(device: torch.device) -> bool:
    """True to use small sizes, as on a CPU, where only the checks themselves are tested."""
    return device.type == "cpu"


@pytest.fixture(scope="session")
def num_gpus(device: torch.device) -> int:
    if device.type == "cpu":
        pytest.skip("needs cuda")
    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def model(pytestconfig: pytest.Config) -> Path:
    return Path(pytestconfig.getoption("--model", BUNDLED_MODEL))


@pytest.fixture(scope="session")
def drafting_model(is_small: bool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with an exit head: on a CPU a tiny one instead of the bundled 32 layers."""
    if not is_small:
        return model
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model(folder, "llama 3")
    spec = ModelSpec.from_folder(folder)
    TrainableExitHead.from_target(folder, spec, 1).save(folder / "exit_head")
    return folder


@pytest.fixture(scope="session", params=["model", "Llama 8B", "Llama 70B TP8"])
def width(request: pytest.FixtureRequest, is_small: bool, model: Path) -> Width:
    if request.param == "model":
        return Width.of(model)
    if is_small:
        pytest.skip("needs cuda")
    return {"Llama 8B": LLAMA_8B, "Llama 70B TP8": LLAMA_70B_TP8}[request.param]


@pytest.fixture(scope="session", autouse=True)
def _machine(device: torch.device, record_testsuite_property: Property) -> None:
    """Writes versions and GPU into the XML."""
    machine = collect_provenance(seed=0).as_json() | {"device": str(device)}
    if device.type == "cuda":
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        capability = torch.cuda.get_device_capability(device)
        machine |= {"capability": capability, "cuda": torch.version.cuda, "nccl": nccl}
    record_testsuite_property("machine", json.dumps(machine))
