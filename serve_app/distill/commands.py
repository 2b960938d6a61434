"""The commands of `eesd distill`: their options are those of the steps that they run."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from typer import Typer

from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.command_line import Run, program_of
from eesd_dist.distill import calibrate, collect, evaluate, refresh, run, sweep
from eesd_dist.distill import train_head as train
from eesd_dist.distill.answers import Machine
from eesd_dist.distill.estimate import Rates, described, estimate
from eesd_dist.distill.folders import write_json
from eesd_dist.distill.held_out import PromptChoice
from eesd_dist.distill.refresh import REPORT_FILE, RefreshReport
from eesd_dist.distill.train.request import TrainRequest
from eesd_dist.model.checkpoint_folder import local_folder
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.heads.head_files import head_digest
from serve_app.config import RouterConfig
from serve_app.distill.executors import RayExecutor, ServiceChoice, executor_for
from serve_app.service.promotion import promote


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """Choice of the running service that gets the new head, if any."""

    promote: Annotated[bool, "load it into the running service if it is better"] = False

    address: Annotated[str | None, "its Ray cluster; without it, the one `eesd serve` started"] = (
        None
    )
    port: Annotated[int | None, "of that service, where there are several"] = None
    app: Annotated[str, "its name in Ray Serve"] = "eesd"
    router: Annotated[str, "its router's name"] = RouterConfig().name
    namespace: Annotated[str, "and the Ray namespace of that"] = RouterConfig().namespace


def promote_if_better(
    folder: Path, report: RefreshReport, promotion: Promotion, *, compared_with: Path
) -> str:
    """Loads the head into the service, without a restart, and adds the reports to refresh.json.

    Does nothing if the gain may be chance. Raises what `serve_app.service.promotion.promote`
    raises, also when the service drafts with another head than the one it was compared with.
    """
    if not report.gain.rises:
        return (
            f"not promoted: the gain of {report.gain.mean:+.4f} may be chance (its interval begins "
            f"at {report.gain.low:+.4f})"
        )
    promoted = promote(
        folder,
        address=promotion.address,
        port=promotion.port,
        app_name=promotion.app,
        router=RouterConfig(name=promotion.router, namespace=promotion.namespace),
        # The new one too: where some pipelines have taken it already, the others may.
        instead_of=(head_digest(compared_with), head_digest(folder)),
    )
    file = folder / REPORT_FILE
    write_json(file, {**read_json(file), "promoted": [asdict(entry) for entry in promoted]})
    names = ", ".join(entry.pipeline for entry in promoted)
    return f"promoted: {len(promoted)} pipelines draft with it now ({names})"


def step_program(name: str) -> Typer:
    """Returns the program of one step."""
    command, help_text = _STEPS[name]
    return program_of(
        command,
        defaults={"model": BUNDLED_MODEL},
        conversions={"model": local_folder},
        help=help_text,
    )


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
