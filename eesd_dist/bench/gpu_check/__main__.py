"""`python -m eesd_dist.bench.gpu_check`: all sections, one table, one JSON file."""

import sys

from eesd_dist.bench.gpu_check.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
