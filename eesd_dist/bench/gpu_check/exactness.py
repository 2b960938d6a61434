"""Texts on the device: the fuzz, which compares each with the same request alone, undrafted.

Random engines and requests on the given model, once for each type, in processes of the fuzz's own.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

from eesd_dist.bench.gpu_check.rows import Rows
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.config import DType

_FUZZ = "eesd_dist.bench.fuzz"
_SEED = 1
_DTYPES: tuple[DType, ...] = ("bfloat16", "float32")


def run(setting: Setting, rows: Rows) -> None:
    if find_spec(_FUZZ) is None:
        rows.cannot("fuzz", "not available", detail=f"this checkout has no {_FUZZ}")
        return
    tokens = 150 if setting.is_small else 20_000
    for at, dtype in enumerate(_DTYPES):
        seconds = 0.9 * setting.left_s / (len(_DTYPES) - at)
        _fuzz(setting, dtype, tokens=tokens, seconds=seconds, rows=rows)


def _fuzz(setting: Setting, dtype: DType, *, tokens: int, seconds: float, rows: Rows) -> None:
    name = f"fuzz, {dtype}"
    words = ["--model", str(setting.model), "--device", setting.device_name, "--dtype", dtype]
    words += ["--random", str(_SEED), "--tokens", str(tokens)]
    words += ["--minutes", f"{0.8 * seconds / 60:.2f}", "--json"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", _FUZZ, *words], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        rows.prove(name, False, value=f"timeout after {seconds:.0f} s")
        return
    lines = (done.stdout or "").strip().splitlines()
    try:
        report = json.loads(lines[-1])
        compared, mismatches = int(report["tokens"]), int(report["mismatches"])
    except (IndexError, KeyError, TypeError, ValueError):
        said = (done.stderr or done.stdout).strip().splitlines()
        detail = said[-1] if said else "it said nothing"
        rows.prove(name, False, value=f"exit status {done.returncode}", detail=detail)
        return
    rows.prove(
        name,
        mismatches == 0 and compared > 0 and done.returncode == 0,
        value=float(mismatches),
        unit="differ",
        detail=f"{compared} tokens, seed {_SEED}"
        + (f"; {' '.join(lines[-4:-1])}" if mismatches else ""),
    )
