"""`eesd distill`: from a target and prompts to a trained, calibrated, measured exit head.

    eesd distill run --model TARGET --out OUT --exit 1      all of the following, restartable

    eesd distill collect     the target's hidden states and best logits over text it wrote
    eesd distill train       a head behind one exit layer, with DeepSpeed
    eesd distill calibrate   how likely is a draft token to be accepted?
    eesd distill evaluate    acceptance, predicted and measured speed-up
    eesd distill sweep       which exit layer and kind of head earn most by measured time
    eesd distill refresh     trains a head further on what a service verified

Each explains itself with --help.
"""

import importlib
import sys
from collections.abc import Callable, Sequence

from eesd_dist.distill.checks import require_distill_extra
from eesd_dist.errors import ConfigError

COMMANDS = ("run", "collect", "train", "calibrate", "evaluate", "sweep", "refresh")


def main(argv: Sequence[str]) -> int:
    command, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if command in ("-h", "--help"):
        sys.stdout.write(__doc__ + "\n")
        raise SystemExit(0)  # as every other command's --help does
    if command not in COMMANDS:
        raise ConfigError(
            f"eesd distill {command}: expected one of {', '.join(COMMANDS)} (see eesd distill "
            "--help); the one command for everything is `eesd distill run`"
        )
    require_distill_extra()
    module = importlib.import_module(f"serve_app.distill.{command}")
    run: Callable[[Sequence[str]], int] = module.main
    return run(rest)
