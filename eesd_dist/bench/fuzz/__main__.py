"""`python -m eesd_dist.bench.fuzz`: the fuzz on a machine with torch and no Ray."""

import sys

from eesd_dist.bench.fuzz.command import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
