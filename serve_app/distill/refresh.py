"""`eesd distill refresh`: a head trained on with what a service verified, taken only if better.

    eesd distill refresh --spool DIR --head HEAD --out NEW [--minutes 2] [--promote]

Online distillation (OSD, arXiv 2310.07177): verification computes hidden states and the target's
distribution for every token that leaves, so the text that users really ask for is training data
for nothing. The spool is copied aside, its pieces are split by sequence, the head is trained on
from where it stands, and old and new are compared on the pieces neither saw. With --promote the
running service takes the new head only if the interval of the gain lies above zero, and if the
service drafts with HEAD.

Killed and started again, the same command goes on where it was. The calibration map is carried over
as it was: after a short refresh it is nearly right, and it can never change a text.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eesd_dist.control.calibrator import CALIBRATION_FILE
from eesd_dist.distill.compare import Difference, HeldOutFigures, difference, figures, judge
from eesd_dist.distill.features import MANIFEST_FILE, FeatureStore
from eesd_dist.distill.folders import only_one, write_json
from eesd_dist.distill.spooled import take_aside
from eesd_dist.distill.target import target_embedding
from eesd_dist.distill.train.learner import TrainOptions, TrainRequest
from eesd_dist.distill.train.run_folder import put_in_place
from eesd_dist.errors import ConfigError
from eesd_dist.model.exit_head import TrainableExitHead
from eesd_dist.model.head_config import HeadConfig, head_digest
from eesd_dist.model.spec import ModelSpec, read_json
from eesd_dist.provenance import collect_provenance
from serve_app.config import BUNDLED_MODEL, RouterConfig
from serve_app.distill.train import train
from serve_app.distill.words import Say, on_stderr
from serve_app.operations.promotion import promote

REPORT_FILE = "refresh.json"
_ASKED_FILE = "asked.json"
_FEATURES = "features"
_LEAST_HELD_OUT = 8
"""An interval over fewer texts would say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshRequest:
    """Which head is to learn from which spool, for how long."""

    model: Path
    spool: Path
    head: Path
    out: Path
    """Folder of the new head."""
    minutes: float | None = 2.0
    max_steps: int | None = None
    held_out_share: float = 0.2
    """Of the spooled pieces: compared on, never learnt from."""
    learning_rate: float = 5e-4
    """A quarter of what a new head learns with: this one knows most of it."""
    workers: int = 1
    seed: int = 0
    options: TrainOptions = field(default_factory=TrainOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshReport:
    """What came of it."""

    num_pieces: int
    num_tokens: int
    num_held_out: int
    """Pieces compared on."""
    old: HeldOutFigures
    new: HeldOutFigures
    gain: Difference
    """In acceptance: greedy agreement where the text was greedy, 1 - TV where it was sampled."""
    agreement_gain: Difference
    one_minus_tv_gain: Difference

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RefreshReport":
        return cls(
            num_pieces=data["num_pieces"],
            num_tokens=data["num_tokens"],
            num_held_out=data["num_held_out"],
            old=HeldOutFigures(**data["old"]),
            new=HeldOutFigures(**data["new"]),
            gain=Difference(**data["gain"]),
            agreement_gain=Difference(**data["agreement_gain"]),
            one_minus_tv_gain=Difference(**data["one_minus_tv_gain"]),
        )


def refresh(request: RefreshRequest, *, say: Say) -> RefreshReport:
    """Trains, compares and writes `request.out`; what is done already is not done again.

    Raises ConfigError for an empty or too small spool, CheckpointError for a head, target and spool
    that do not belong together.
    """
    spec = ModelSpec.from_folder(request.model)
    config = HeadConfig.read(request.head, target=spec, target_path=request.model)
    asked = _asked(request)
    report_file = request.out / REPORT_FILE
    if request.out.exists():
        found = read_json(report_file) if report_file.exists() else {}
        if found.get("asked") != asked:
            raise ConfigError(
                f"{request.out}: exists, and is not what this command would make: name another "
                "folder with --out, or remove this one"
            )
        say(f"refresh: done before, {request.out}")
        return RefreshReport.from_json(dict(found))
    work = request.out.with_name(f"{request.out.name}.work")
    with only_one(work):
        _claim(work, asked)
        store = take_aside(
            request.spool,
            work / _FEATURES,
            target=request.model,
            exit_layer=config.exit_layer,
            seed=request.seed,
        )
        _, held_out = store.split(request.held_out_share, request.seed)
        try:
            _require_enough(request, store, held_out)
        except ConfigError:  # another day the spool holds more: this copy of it must not stay
            shutil.rmtree(store.folder)
            raise
        say(
            f"refresh: {store.manifest.num_tokens:,} tokens in {store.num_sequences:,} pieces, "
            f"{len(held_out):,} of them held out"
        )
        trained = train(_train_request(request, config, work))
        report = _compared(request, spec, store, held_out, trained)
        _publish(request, trained, {"asked": asked, **asdict(report)})
    shutil.rmtree(work)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Which running service may take the new head."""

    address: str | None = None
    """Its Ray cluster; None: the one that this user's `eesd serve` has started on `port`."""
    port: int = 8000
    app_name: str = "eesd"
    router: RouterConfig = field(default_factory=RouterConfig)


def promote_if_better(
    folder: Path, report: RefreshReport, service: Service, *, compared_with: Path
) -> str:
    """Loads the head into the running service, without a restart, if it is better than the one it
    was compared with and the service drafts with that one; says what came of it and keeps it in
    refresh.json. Raises what `serve_app.operations.promotion.promote` raises."""
    if not report.gain.rises:
        return (
            f"not promoted: the gain of {report.gain.mean:+.4f} may be chance (its interval begins "
            f"at {report.gain.low:+.4f})"
        )
    promoted = promote(
        folder,
        address=service.address,
        port=service.port,
        app_name=service.app_name,
        router=service.router,
        # The new one too: where some pipelines have taken it already, the others may.
        instead_of=(head_digest(compared_with), head_digest(folder)),
    )
    file = folder / REPORT_FILE
    write_json(file, {**read_json(file), "promoted": [asdict(one) for one in promoted]})
    names = ", ".join(one.pipeline for one in promoted)
    return f"promoted: {len(promoted)} pipelines draft with it now ({names})"


def described(report: RefreshReport) -> str:
    """The comparison, for people."""
    rows = [
        ("acceptance", report.old.acceptance, report.new.acceptance, report.gain),
        ("  greedy agreement", report.old.agreement, report.new.agreement, report.agreement_gain),
        (
            "  1 - TV",
            report.old.one_minus_tv,
            report.new.one_minus_tv,
            report.one_minus_tv_gain,
        ),
    ]
    lines = [f"{'held out':20}{'old':>8}{'new':>8}    gain, 95% interval"]
    lines += [
        f"{name:20}{old:8.4f}{new:8.4f}    {gain.mean:+.4f}  [{gain.low:+.4f}, {gain.high:+.4f}]"
        for name, old, new, gain in rows
    ]
    verdict = (
        "better than chance explains: worth promoting"
        if report.gain.rises
        else "not better beyond chance: the service keeps its head"
    )
    return "\n".join([*lines, verdict])


def _asked(request: RefreshRequest) -> dict[str, object]:
    """What decides the new head; a folder made with other words is refused."""
    said = asdict(request)
    digest = hashlib.sha256()
    for file in sorted(request.head.glob("*.json")) + sorted(request.head.glob("*.safetensors")):
        digest.update(file.read_bytes())
    said["head"] = digest.hexdigest()
    del said["out"], said["options"]
    return {name: str(x) if isinstance(x, Path) else x for name, x in said.items()}


def _claim(work: Path, asked: Mapping[str, object]) -> None:
    """Writes down what is asked; where a copy of a spool stands already, it has to be of the same
    one, split alike."""
    file = work / _ASKED_FILE
    if not (file.exists() and (work / _FEATURES / MANIFEST_FILE).exists()):
        write_json(file, asked)
        return
    found = read_json(file)
    for name in ("spool", "held_out_share", "seed"):
        if found.get(name) != asked[name]:
            raise ConfigError(
                f"{work}: was begun with {name} {found.get(name)!r}, now asked for "
                f"{asked[name]!r}: ask for the same to go on with it, name another folder with "
                "--out, or remove this one"
            )


def _require_enough(request: RefreshRequest, store: FeatureStore, held_out: Sequence[int]) -> None:
    if len(held_out) < _LEAST_HELD_OUT:
        raise ConfigError(
            f"{request.spool}: {store.num_sequences} pieces leave {len(held_out)} to compare on, "
            f"expected at least {_LEAST_HELD_OUT}: let the service answer more requests, or raise "
            "spool.sample_rate or --held-out-share"
        )


def _train_request(request: RefreshRequest, config: HeadConfig, work: Path) -> TrainRequest:
    options = replace(
        request.options,
        learning_rate=request.learning_rate,
        held_out_share=request.held_out_share,
        # The best of many heads on the held-out pieces would not be judged fairly on them.
        keep="last",
        evaluate_every=1_000_000,
    )
    return TrainRequest(
        model=request.model,
        features=work / _FEATURES,
        out=work / "head",
        checkpoints=work / "run",
        exit_layer=config.exit_layer,
        head=config.kind,
        draft_vocab=config.draft_vocab_size,
        reads_embedding=config.reads_embedding,
        minutes=request.minutes,
        max_steps=request.max_steps,
        workers=request.workers,
        start=request.head,
        seed=request.seed,
        options=options,
    )


def _compared(
    request: RefreshRequest,
    spec: ModelSpec,
    store: FeatureStore,
    held_out: Sequence[int],
    trained: Path,
) -> RefreshReport:
    pieces = list(store.sequences(held_out))
    embed = target_embedding(request.model, spec)
    old, new = (
        judge(
            TrainableExitHead.read(folder, target=spec, target_path=request.model),
            pieces,
            embed=embed,
        )
        for folder in (request.head, trained)
    )
    return RefreshReport(
        num_pieces=store.num_sequences,
        num_tokens=store.manifest.num_tokens,
        num_held_out=len(held_out),
        old=figures(old),
        new=figures(new),
        gain=difference(old, new, of=lambda one: one.accepted, seed=request.seed),
        agreement_gain=difference(old, new, of=lambda one: one.agreed, seed=request.seed),
        one_minus_tv_gain=difference(old, new, of=lambda one: one.overlap, seed=request.seed),
    )


def _publish(request: RefreshRequest, trained: Path, report: dict[str, object]) -> None:
    """The folder appears with everything in it."""
    ready = trained.with_name("ready")
    shutil.copytree(trained, ready, dirs_exist_ok=True)
    calibration = request.head / CALIBRATION_FILE
    has_calibration = calibration.exists()
    if has_calibration:
        shutil.copy(calibration, ready / CALIBRATION_FILE)
    write_json(
        ready / REPORT_FILE,
        {
            **report,
            "calibration": "carried over from the old head, not fitted anew: `eesd distill "
            "calibrate` does that"
            if has_calibration
            else "the old head had none",
            "refreshed_from": str(request.head),
            "provenance": collect_provenance(seed=request.seed).as_json(),
        },
    )
    put_in_place(ready, request.out)


# -- words ----------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="eesd distill refresh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--spool", type=Path, required=True, help="the service's spool.folder")
    add("--head", type=Path, required=True, help="the head that the service drafts with")
    add("--out", type=Path, required=True, help="folder of the new head")
    add("--model", type=Path, default=BUNDLED_MODEL, help="folder of the target (the bundled one)")
    add("--minutes", type=float, default=2.0, help="of training")
    add("--steps", type=int, help="of training, at most")
    add("--rate", type=float, default=5e-4, help="highest learning rate")
    add("--held-out-share", type=float, default=0.2, help="of the pieces: to compare on")
    add("--workers", type=int, default=1, help="training processes")
    add("--threads", type=int, help="CPU threads of each")
    add("--seed", type=int, default=0)
    add("--promote", action="store_true", help="load it into the running service if it is better")
    add("--address", help="the service's Ray cluster; without it, the one `eesd serve` started")
    add("--port", type=int, default=Service().port, help="of that service")
    add("--app", default=Service().app_name, help="its name in Ray Serve")
    add("--router", default=RouterConfig().name, help="its router's name")
    add("--namespace", default=RouterConfig().namespace, help="and the Ray namespace of that")
    options = parser.parse_args(argv)
    request = RefreshRequest(
        model=options.model,
        spool=options.spool,
        head=options.head,
        out=options.out,
        minutes=options.minutes,
        max_steps=options.steps,
        held_out_share=options.held_out_share,
        learning_rate=options.rate,
        workers=options.workers,
        seed=options.seed,
        options=TrainOptions(threads=options.threads),
    )
    report = refresh(request, say=on_stderr)
    sys.stdout.write(described(report) + "\n")
    if options.promote:
        service = Service(
            address=options.address,
            port=options.port,
            app_name=options.app,
            router=RouterConfig(name=options.router, namespace=options.namespace),
        )
        said = promote_if_better(options.out, report, service, compared_with=options.head)
        sys.stdout.write(said + "\n")
    return 0
