"""`python -m cluster.preflight`: the same as `eesd preflight`."""

import sys

from cluster.preflight.command import main
from eesd_dist.command_line import run_command

raise SystemExit(run_command(main, sys.argv[1:], program="python -m cluster.preflight"))
