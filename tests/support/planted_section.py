"""A section of the GPU check that ends in the way that the name of the model says."""

import os
import signal
import sys
import time

from eesd_dist.bench.gpu_check.report_rows import Rows
from eesd_dist.bench.gpu_check.setting import Setting


def run(setting: Setting, rows: Rows) -> None:
    rows.prove("before", True, value=1.0, unit="ms")
    what = setting.model.name
    if what == "passes":
        rows.measure("a figure", float("nan"))
    elif what == "differs":
        rows.prove("a promise", False, value=3.0, unit="differ", detail="tokens of 100")
    elif what == "raises":
        raise ValueError("this card has no memory")
    elif what == "hangs":
        time.sleep(600)
    elif what == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "leaves":
        sys.stdout.write("words of a library\n")
        sys.stdout.flush()
        os._exit(7)
