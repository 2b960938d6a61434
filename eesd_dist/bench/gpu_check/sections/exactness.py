"""Checks texts on the device with the fuzz, which compares each with plain decoding.

Random engines and requests, in a separate process for each type. A process that has not compared
all its tokens in time is interrupted, and reports what it has compared.
"""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.setting import Setting
from eesd_dist.config import DType

_FUZZ = "eesd_dist.bench.fuzz"
_SEED = 1
_INTERRUPTED = 130
_STOPPING_S = 15.0


def run(setting: Setting, rows: Rows) -> None:
    if find_spec(_FUZZ) is None:
        rows.cannot("fuzz", "not available", detail=f"this checkout has no {_FUZZ}")
        return
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    if setting.is_small:
        _fuzz(setting, _small_model(setting.scratch), dtypes[0], tokens=100, rows=rows)
        return
    for at, dtype in enumerate(dtypes):
        seconds = setting.left_s / (len(dtypes) - at) - 5.0
        _fuzz(setting, setting.model, dtype, tokens=20_000, rows=rows, seconds=seconds)


def _small_model(scratch: Path) -> Path:
    """Writes a small random checkpoint with an exit head, instead of the bundled 32 layers."""
    from eesd_dist.bench.gpu_check.checkpoints import write_small
    from eesd_dist.model.heads.trainable_head import TrainableExitHead
    from eesd_dist.model.spec import ModelSpec

    folder = write_small(scratch / "small", "llama 3 rope")
    spec = ModelSpec.from_folder(folder)
    TrainableExitHead.from_target(folder, spec, 1).save(folder / "exit_head")
    return folder


def _fuzz(
    setting: Setting,
    model: Path,
    dtype: DType,
    *,
    tokens: int,
    rows: Rows,
    seconds: float | None = None,
) -> None:
    seconds = setting.left_s - 5.0 if seconds is None else seconds
    name = f"fuzz, {dtype}"
    words = ["--model", str(model), "--device", setting.device_name, "--dtype", dtype]
    words += ["--random", str(_SEED), "--tokens", str(tokens)]
    words += ["--minutes", f"{0.6 * seconds / 60:.3f}", "--json"]
    words += ["--max-failures", "1", "--case-folder", str(setting.scratch)]
    done = _within([sys.executable, "-m", _FUZZ, *words], seconds)
    if done is None:
        rows.prove(name, False, value=f"timeout after {seconds:.0f} s")
        return
    lines = done.stdout.strip().splitlines()
    try:
        report = json.loads(lines[-1])
        compared, mismatches = int(report["tokens"]), int(report["mismatches"])
    except (IndexError, KeyError, TypeError, ValueError):
        said = (done.stderr or done.stdout).strip().splitlines()
        detail = said[-1] if said else "it said nothing"
        rows.prove(name, False, value=f"exit status {done.returncode}", detail=detail)
        return
    stopped = ", its time was over" if done.returncode == _INTERRUPTED else ""
    first = f"; first: {report.get('failures')}" if mismatches else ""
    rows.prove(
        name,
        mismatches == 0 and compared > 0 and done.returncode in (0, _INTERRUPTED),
        value=float(mismatches),
        unit="differ",
        detail=f"{compared} tokens, seed {_SEED}{stopped}{first}",
    )


def _hear_interrupts() -> None:
    """Restores SIGINT, which a shell makes background processes and their children ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _within(command: list[str], seconds: float) -> "subprocess.CompletedProcess[str] | None":
    """Runs a command, interrupts it when its time is over, and kills it if it does not end."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_interrupts,
    ) as process:
        try:
            try:
                out, err = process.communicate(timeout=max(seconds - _STOPPING_S, 1.0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=_STOPPING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)
