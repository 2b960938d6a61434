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

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from eesd_dist.errors import ConfigError
from serve_app.config import BUNDLED_MODEL
from serve_app.distill.flags import add_flags, read_flags

# A command imports what it needs: torch takes seconds to import.

_EXTRA = ("deepspeed", "matplotlib", "pandas", "pyarrow", "tensorboard")


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
    _require_extra()
    COMMANDS[command](rest)
    return 0


def _run(words: Sequence[str]) -> None:
    from eesd_dist.distill import run as step
    from serve_app.distill.executor import RayExecutor

    options = _parser("run", step, step.RunRequest, RayExecutor).parse_args(words)
    request = read_flags(step.RunRequest, options)
    step.run(request, executor=read_flags(RayExecutor, options), say=_on_stderr)


def _collect(words: Sequence[str]) -> None:
    from eesd_dist.distill import collect as step
    from serve_app.distill.executor import RayExecutor

    parser = _parser("collect", step, step.CollectRequest, RayExecutor)
    parser.add_argument("--text-only", action="store_true", help="no prompts, only --text")
    options = parser.parse_args(words)
    request = read_flags(step.CollectRequest, options)
    if options.text_only:
        request = replace(request, options=replace(request.options, prompts=None))
    step.collect(request, executor=read_flags(RayExecutor, options), say=_on_stderr)


def _train(words: Sequence[str]) -> None:
    from eesd_dist.distill.train import step
    from eesd_dist.distill.train.request import TrainRequest
    from serve_app.distill.executor import RayExecutor

    options = _parser("train", step, TrainRequest, RayExecutor).parse_args(words)
    request = read_flags(TrainRequest, options)
    head = step.train(request, executor=read_flags(RayExecutor, options))
    _on_stderr(f"train: the head is in {head}")


def _calibrate(words: Sequence[str]) -> None:
    from eesd_dist.distill import calibrate as step
    from eesd_dist.distill.answers import Machine
    from eesd_dist.distill.executor import LocalExecutor
    from eesd_dist.distill.held_out import PromptChoice

    options = _parser("calibrate", step, Machine, PromptChoice, step.CalibrateOptions).parse_args(
        words
    )
    choice = read_flags(PromptChoice, options)
    choice.require_unseen_by(options.head)
    step.calibrate(
        read_flags(Machine, options),
        choice.read(options.model).calibrated,
        read_flags(step.CalibrateOptions, options),
        seed=choice.seed,
        executor=LocalExecutor(),
        say=_on_stderr,
    )


def _evaluate(words: Sequence[str]) -> None:
    from eesd_dist.distill import evaluate as step
    from eesd_dist.distill.answers import Machine
    from eesd_dist.distill.executor import LocalExecutor
    from eesd_dist.distill.held_out import PromptChoice

    options = _parser("evaluate", step, Machine, PromptChoice, step.EvaluateOptions).parse_args(
        words
    )
    choice = read_flags(PromptChoice, options)
    choice.require_unseen_by(options.head)
    step.evaluate(
        read_flags(Machine, options),
        choice.read(options.model).judged,
        read_flags(step.EvaluateOptions, options),
        seed=choice.seed,
        executor=LocalExecutor(),
        say=_on_stderr,
    )


def _sweep(words: Sequence[str]) -> None:
    from eesd_dist.distill import sweep as step
    from eesd_dist.distill.answers import Machine
    from eesd_dist.distill.collect import CollectOptions, CollectRequest, collect
    from eesd_dist.distill.train.request import TrainOptions
    from serve_app.distill.executor import RayExecutor

    parser = _parser("sweep", step, CollectOptions, RayExecutor, step.Tries, step.SweepOptions)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the heads and of sweep.json")
    add("--features", type=Path, help="what `eesd distill collect` wrote (OUT/features)")
    add("--collect", action="store_true", help="collect the features of all exits first")
    add("--collect-minutes", type=float, help="begin no shard later than this")
    add("--rate", type=float, default=TrainOptions().learning_rate, help="highest learning rate")
    options = parser.parse_args(words)
    executor = read_flags(RayExecutor, options)
    text = read_flags(CollectOptions, options)
    features = options.features or options.out / "features"
    if options.collect:
        wanted = CollectRequest(
            options=text, out=features, exits=options.exits, minutes=options.collect_minutes
        )
        collect(wanted, executor=executor, say=_on_stderr)
    choice = text.prompt_choice()
    choice.require_kept_aside_from(features)
    request = step.SweepRequest(
        machine=read_flags(Machine, options, head=options.out),
        features=features,
        out=options.out,
        combinations=read_flags(step.Tries, options).combinations(),
        parts=choice.read(options.model),
        options=read_flags(step.SweepOptions, options),
        temperatures=text.temperatures,
        seed=text.seed,
        training=TrainOptions(learning_rate=options.rate),
    )
    report = step.sweep(request, executor=executor, say=_on_stderr)
    sys.stdout.write(step.table(report) + "\n")


def _refresh(words: Sequence[str]) -> None:
    from eesd_dist.distill import refresh as step
    from serve_app.distill.executor import RayExecutor
    from serve_app.distill.promote import RunningService, promote_if_better

    parser = _parser("refresh", step, step.RefreshRequest, RunningService)
    parser.add_argument(
        "--promote", action="store_true", help="load it into the running service if it is better"
    )
    options = parser.parse_args(words)
    request = read_flags(step.RefreshRequest, options)
    report = step.refresh(request, executor=RayExecutor(), say=_on_stderr)
    sys.stdout.write(step.described(report) + "\n")
    if options.promote:
        service = read_flags(RunningService, options)
        said = promote_if_better(request.out, report, service, compared_with=request.head)
        sys.stdout.write(said + "\n")


COMMANDS = {
    "run": _run,
    "collect": _collect,
    "train": _train,
    "calibrate": _calibrate,
    "evaluate": _evaluate,
    "sweep": _sweep,
    "refresh": _refresh,
}


def _parser(command: str, step: ModuleType, *options: type[Any]) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"eesd distill {command}",
        description=step.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    for each in options:
        add_flags(parser, each, model=BUNDLED_MODEL)
    return parser


def _require_extra() -> None:
    """Raises ConfigError naming all that is missing, rather than hours later the first of it."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"distillation needs {', '.join(missing)}, not found here: pip install "
            "'eesd-dist[distill]'"
        )


def _on_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
