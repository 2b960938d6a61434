"""What runs on a GPU without Ray runs without Numba too."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GPU_MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for folder in ("eesd_dist/backends/cuda", "eesd_dist/backends/torch", "tests/gpu")
    for file in (ROOT / folder).rglob("*.py")
    if file.name not in ("__init__.py", "__main__.py")
)
_BLOCKED = f"""
import importlib
import sys

class _Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite", "ray"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, _Absent())
for module in {GPU_MODULES!r} + [
    "eesd_dist.backends.cpu.engine",
    "eesd_dist.backends.cpu.model",
    "eesd_dist.backends.cpu.sampling",
    "eesd_dist.engine.build",
    "eesd_dist.engine.local",
    "tests.conftest",
]:
    importlib.import_module(module)
"""


def test_no_module_of_a_gpu_imports_numba() -> None:
    assert len(GPU_MODULES) > 20
    done = subprocess.run([sys.executable, "-c", _BLOCKED], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
