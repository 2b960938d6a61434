"""`python -m eesd_dist.bench.fuzz`: the fuzz on a machine with torch and without Ray."""

import sys

from eesd_dist.bench.fuzz.command import main
from eesd_dist.command_line import run_command

if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], program="python -m eesd_dist.bench.fuzz"))
