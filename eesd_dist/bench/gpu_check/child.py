"""Runs one section in a separate process: rows go to stdout, everything else to stderr.

    python -m eesd_dist.bench.gpu_check.child SECTION MODULE DEVICE MODEL SCRATCH SECONDS

A CUDA context that a failure has corrupted ends with this process.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import cast

from eesd_dist.bench.gpu_check.report_rows import Row, Rows
from eesd_dist.bench.gpu_check.setting import DeviceName, SectionModule, Setting


def main(argv: list[str]) -> int:
    section, module, device, model, scratch, seconds = argv
    # Output of libraries to stdout must not get between the rows.
    rows_fd = os.dup(1)
    os.dup2(2, 1)

    def emit(row: Row) -> None:
        os.write(rows_fd, (row.to_line() + "\n").encode())

    setting = Setting(
        device_name=cast(DeviceName, device),
        model=Path(model),
        scratch=Path(scratch),
        seconds=float(seconds),
    )
    cast(SectionModule, importlib.import_module(module)).run(setting, Rows(section, emit))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
