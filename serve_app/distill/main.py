"""The commands of `eesd distill`: their options are those of the steps that they run."""

import sys
from collections.abc import Mapping

from typer import Typer

from eesd_dist.command_line import Run, program_of
from eesd_dist.distill import calibrate, collect, evaluate, refresh, run, sweep
from eesd_dist.distill import train_head as train
from eesd_dist.distill.answers import Machine
from eesd_dist.distill.held_out import PromptChoice
from eesd_dist.distill.train.request import TrainRequest
from serve_app.config import BUNDLED_MODEL
from serve_app.distill.estimate import Rates, described, estimate
from serve_app.distill.executor import RayExecutor
from serve_app.distill.promote import Promotion, promote_if_better
from serve_app.distill.served import ServiceChoice, executor_for


def step_program(name: str) -> Typer:
    """Returns the program of one step."""
    command, help_text = _STEPS[name]
    return program_of(command, defaults={"model": BUNDLED_MODEL}, help=help_text)


def _run(
    request: run.RunRequest, executor: RayExecutor, service: ServiceChoice, rates: Rates
) -> None:
    if rates.dry_run:
        sys.stdout.write(described(estimate(request, rates), request, rates) + "\n")
        return
    with executor_for(service, executor, model=request.collect.model) as used:
        run.run(request, executor=used, say=_on_stderr)


def _collect(
    request: collect.CollectRequest, executor: RayExecutor, service: ServiceChoice
) -> None:
    with executor_for(service, executor, model=request.options.model) as used:
        collect.collect(request, executor=used, say=_on_stderr)


def _train(request: TrainRequest, executor: RayExecutor) -> None:
    head = train.train(request, executor=executor)
    _on_stderr(f"train: the head is in {head}")


def _calibrate(
    machine: Machine,
    choice: PromptChoice,
    options: calibrate.CalibrateOptions,
    executor: RayExecutor,
    service: ServiceChoice,
) -> None:
    choice.require_unseen_by(machine.head)
    with executor_for(service, executor, model=machine.model) as used:
        calibrate.calibrate(
            machine,
            choice.read(machine.model).calibrated,
            options,
            seed=choice.seed,
            executor=used,
            say=_on_stderr,
        )


def _evaluate(
    machine: Machine,
    choice: PromptChoice,
    options: evaluate.EvaluateOptions,
    executor: RayExecutor,
    service: ServiceChoice,
) -> None:
    choice.require_unseen_by(machine.head)
    with executor_for(service, executor, model=machine.model) as used:
        evaluate.evaluate(
            machine,
            choice.read(machine.model).judged,
            options,
            seed=choice.seed,
            executor=used,
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
        collection = collect.CollectRequest(
            options=text,
            out=files.features_folder,
            exits=tries.exits,
            minutes=files.collect_minutes,
        )
        collect.collect(collection, executor=executor, say=_on_stderr)
    choice = text.prompt_choice()
    choice.require_kept_aside_from(files.features_folder)
    split = choice.read(text.model)
    request = sweep.SweepRequest(
        machine=Machine(model=text.model, head=files.out, dtype=text.dtype, threads=text.threads),
        features=files.features_folder,
        out=files.out,
        combinations=tries.combinations(),
        calibrated=split.calibrated,
        judged=split.judged,
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
        outcome = promote_if_better(request.out, report, promotion, compared_with=request.head)
        sys.stdout.write(outcome + "\n")


_STEPS: Mapping[str, tuple[Run, str | None]] = {
    "run": (_run, run.__doc__),
    "collect": (_collect, collect.__doc__),
    "train": (_train, train.__doc__),
    "calibrate": (_calibrate, calibrate.__doc__),
    "evaluate": (_evaluate, evaluate.__doc__),
    "sweep": (_sweep, sweep.__doc__),
    "refresh": (_refresh, refresh.__doc__),
}


def _on_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
