"""Reports the machine: versions, and its peak copy bandwidth and bfloat16 throughput."""

import platform
import subprocess
from importlib import metadata

import torch

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.sections.timer import copy_rates, time_of
from eesd_dist.bench.gpu_check.setting import Setting

_PACKAGES = ("triton", "transformers", "numpy", "pydantic")


def run(setting: Setting, rows: Rows) -> None:
    rows.measure("python", platform.python_version(), detail=platform.platform())
    rows.measure("torch", torch.__version__)
    for name in _PACKAGES:
        rows.measure(name, _version(name))
    device = setting.device()
    if device.type == "cuda":
        _gpu(device, rows)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        rows.measure("CPU capability", capability, detail=f"{torch.get_num_threads()} threads")
        rows.cannot("GPU, driver, CUDA, NCCL", "needs cuda")
    rates = copy_rates(device, budget_s=min(6.0, setting.left_s / 6))
    by_size = ", ".join(f"{size >> 20} MiB {rate / 1e9:.0f}" for size, rate in rates.items())
    rows.measure("copy, read + written", max(rates.values()) / 1e9, "GB/s", detail=by_size)
    width = 512 if setting.is_small else 8192
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    took = time_of(lambda: a @ b, device, budget_s=min(2.0, setting.left_s / 6))
    rate = 2 * width**3 / took.device_s
    rows.measure(f"bfloat16 product, {width} wide", rate / 1e12, "TFLOP/s", detail="random data")


def _gpu(device: torch.device, rows: Rows) -> None:
    found = torch.cuda.get_device_properties(device)
    rows.measure(
        "GPU",
        found.name,
        detail=f"capability {found.major}.{found.minor}, {found.multi_processor_count} SMs, "
        f"L2 {found.L2_cache_size >> 20} MiB, {found.total_memory / 2**30:.0f} GiB; "
        f"{torch.cuda.device_count()} visible",
    )
    rows.measure("driver", _driver())
    rows.measure("CUDA, of torch's build", str(torch.version.cuda))
    nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    rows.measure("NCCL", ".".join(str(part) for part in nccl))


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10.0)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {type(error).__name__}"
    return done.stdout.strip().splitlines()[0]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
