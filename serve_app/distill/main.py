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
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from inspect import signature
from typing import NamedTuple

from eesd_dist.distill import calibrate, collect, evaluate, refresh, run, sweep
from eesd_dist.distill import train_head as train
from eesd_dist.distill.answers import Machine
from eesd_dist.distill.executor import LocalExecutor
from eesd_dist.distill.held_out import PromptChoice
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.errors import ConfigError
from serve_app.config import BUNDLED_MODEL
from serve_app.distill.executor import RayExecutor
from serve_app.distill.flags import add_flags, read_flags
from serve_app.distill.promote import Promotion, promote_if_better

_EXTRA = ("deepspeed", "matplotlib", "pandas", "pyarrow", "tensorboard")


def main(argv: Sequence[str]) -> int:
    name, words = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        sys.stdout.write(__doc__ + "\n")
        raise SystemExit(0)  # as every other command's --help does
    if name not in COMMANDS:
        raise ConfigError(
            f"eesd distill {name}: expected one of {', '.join(COMMANDS)} (see eesd distill "
            "--help); the one command for everything is `eesd distill run`"
        )
    _require_extra()
    command = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"eesd distill {name}",
        description=command.help,
        formatter_class=RawDescriptionHelpFormatter,
    )
    groups = {each.name: each.annotation for each in signature(command.run).parameters.values()}
    for group in groups.values():
        add_flags(parser, group, model=BUNDLED_MODEL)
    options = parser.parse_args(words)
    command.run(**{name: read_flags(group, options) for name, group in groups.items()})
    return 0


def _run(request: run.RunRequest, executor: RayExecutor) -> None:
    run.run(request, executor=executor, say=_on_stderr)


def _collect(request: collect.CollectRequest, executor: RayExecutor) -> None:
    collect.collect(request, executor=executor, say=_on_stderr)


def _train(request: TrainRequest, executor: RayExecutor) -> None:
    head = train.train(request, executor=executor)
    _on_stderr(f"train: the head is in {head}")


def _calibrate(machine: Machine, choice: PromptChoice, options: calibrate.CalibrateOptions) -> None:
    choice.require_unseen_by(machine.head)
    calibrate.calibrate(
        machine,
        choice.read(machine.model).calibrated,
        options,
        seed=choice.seed,
        executor=LocalExecutor(),
        say=_on_stderr,
    )


def _evaluate(machine: Machine, choice: PromptChoice, options: evaluate.EvaluateOptions) -> None:
    choice.require_unseen_by(machine.head)
    evaluate.evaluate(
        machine,
        choice.read(machine.model).judged,
        options,
        seed=choice.seed,
        executor=LocalExecutor(),
        say=_on_stderr,
    )


def _sweep(
    text: collect.CollectOptions,
    files: sweep.SweepFiles,
    tries: sweep.Tries,
    options: sweep.SweepOptions,
    executor: RayExecutor,
) -> None:
    if files.collect:
        wanted = collect.CollectRequest(
            options=text,
            out=files.features_folder,
            exits=tries.exits,
            minutes=files.collect_minutes,
        )
        collect.collect(wanted, executor=executor, say=_on_stderr)
    choice = text.prompt_choice()
    choice.require_kept_aside_from(files.features_folder)
    parts = choice.read(text.model)
    request = sweep.SweepRequest(
        machine=Machine(model=text.model, head=files.out, dtype=text.dtype, threads=text.threads),
        features=files.features_folder,
        out=files.out,
        combinations=tries.combinations(),
        calibrated=parts.calibrated,
        judged=parts.judged,
        options=options,
        temperatures=text.temperatures,
        seed=text.seed,
    )
    report = sweep.sweep(request, executor=executor, say=_on_stderr)
    sys.stdout.write(sweep.table(report) + "\n")


def _refresh(request: refresh.RefreshRequest, promotion: Promotion) -> None:
    report = refresh.refresh(request, executor=RayExecutor(), say=_on_stderr)
    sys.stdout.write(refresh.described(report) + "\n")
    if promotion.promote:
        told = promote_if_better(request.out, report, promotion, compared_with=request.head)
        sys.stdout.write(told + "\n")


class _Command(NamedTuple):
    run: Callable[..., None]
    """Its parameters are groups of options."""
    help: str | None


COMMANDS = {
    "run": _Command(_run, run.__doc__),
    "collect": _Command(_collect, collect.__doc__),
    "train": _Command(_train, train.__doc__),
    "calibrate": _Command(_calibrate, calibrate.__doc__),
    "evaluate": _Command(_evaluate, evaluate.__doc__),
    "sweep": _Command(_sweep, sweep.__doc__),
    "refresh": _Command(_refresh, refresh.__doc__),
}


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
