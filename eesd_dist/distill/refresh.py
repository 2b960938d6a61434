"""`eesd distill refresh`: trains a head further on a service's recording, and compares both heads.

Online distillation (OSD, arXiv 2310.07177): verification computes hidden states and the target's
distribution for every emitted token, so that the text of real requests is training data at no cost.
The recording is copied, its pieces are split by sequence, the head is trained further, and the old
and the new head are compared on held-out pieces. With --promote the running service takes the new
head only if the interval of the gain is above zero, and if the service drafts with HEAD.

After an interruption the same command continues. The calibration is carried over: after a short
refresh it is nearly right, and it never changes a text.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import TypeAdapter

from eesd_dist.control.calibrator import CALIBRATION_FILE
from eesd_dist.distill.compare import Difference, HeldOutFigures, difference, figures, judge
from eesd_dist.distill.executor import Executor, Say
from eesd_dist.distill.features import (
    MANIFEST_FILE,
    FeatureManifest,
    FeatureSequence,
    FeatureStore,
    identity_of,
    weights_fingerprint,
    write_shard,
)
from eesd_dist.distill.folders import only_one, put_in_place, require_same, write_json
from eesd_dist.distill.train.request import TrainOptions, TrainRequest
from eesd_dist.distill.train_head import train
from eesd_dist.errors import CheckpointError, ConfigError
from eesd_dist.model.config_fields import read_json
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.heads.trainable_head import TrainableExitHead
from eesd_dist.model.spec import ModelSpec
from eesd_dist.provenance import collect_provenance

REPORT_FILE = "refresh.json"
_SETTINGS_FILE = "asked.json"
_LEAST_HELD_OUT = 8
"""Minimum held-out pieces: an interval over fewer is meaningless."""
_PER_SHARD = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshRequest:
    """Options of a refresh."""

    model: Annotated[Path, "folder of the target (the bundled one)"]
    recording: Annotated[Path, "the service's recorder.folder"]
    head: Annotated[Path, "the head that the service drafts with"]
    out: Annotated[Path, "folder of the new head"]
    minutes: Annotated[float | None, "minutes of training"] = 2.0
    steps: Annotated[int | None, "maximum training steps"] = None
    held_out_share: Annotated[float, "share of pieces held out for the comparison"] = 0.2
    learning_rate: Annotated[float, "--rate: maximum learning rate; lower than for a new head"] = (
        5e-4
    )
    workers: Annotated[int, "training processes"] = 1
    threads: Annotated[int | None, "CPU threads per process"] = None
    seed: int = 0

    @property
    def work(self) -> Path:
        """Folder of intermediate files; removed when the new head is written."""
        return self.out.with_name(f"{self.out.name}.work")

    def settings(self) -> dict[str, object]:
        """Returns the options that determine the new head; a folder of other options is refused."""
        digest = hashlib.sha256()
        for file in sorted(self.head.glob("*.json")) + sorted(self.head.glob("*.safetensors")):
            digest.update(file.read_bytes())
        return {
            "model": str(self.model),
            "recording": str(self.recording),
            "head": digest.hexdigest(),
            "minutes": self.minutes,
            "max_steps": self.steps,
            "held_out_share": self.held_out_share,
            "learning_rate": self.learning_rate,
            "workers": self.workers,
            "seed": self.seed,
        }

    def training(self, config: HeadConfig, options: TrainOptions) -> TrainRequest:
        return TrainRequest(
            model=self.model,
            features=self.work / "features",
            out=self.work / "head",
            checkpoints=self.work / "run",
            exit_layer=config.exit_layer,
            head=config.kind,
            draft_vocab=config.draft_vocab_size,
            minutes=self.minutes,
            max_steps=self.steps,
            workers=self.workers,
            threads=self.threads,
            start=self.head,
            seed=self.seed,
            options=replace(
                options,
                learning_rate=self.learning_rate,
                held_out_share=self.held_out_share,
                # "best" would select on the held-out pieces and bias the comparison on them.
                keep="last",
                evaluate_every=1_000_000,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshReport:
    """Results of a refresh."""

    num_pieces: int
    num_tokens: int
    num_held_out: int
    """Number of pieces in the comparison."""
    old: HeldOutFigures
    new: HeldOutFigures
    gain: Difference
    """Gain in acceptance: agreement in greedy text, 1 - TV in sampled text."""
    agreement_gain: Difference
    one_minus_tv_gain: Difference


def refresh(
    request: RefreshRequest,
    options: TrainOptions | None = None,
    *,
    executor: Executor,
    say: Say,
) -> RefreshReport:
    """Trains, compares and writes `request.out`; finished parts are not repeated.

    Raises ConfigError for an empty or too small recording, CheckpointError for a head, target and
    recording that do not match.
    """
    spec = ModelSpec.from_folder(request.model)
    config = HeadConfig.read(request.head, target=spec, target_path=request.model)
    settings = request.settings()
    if request.out.exists():
        return _finished(request.out, settings, say=say)
    training = request.training(config, options or TrainOptions())
    with only_one(request.work):
        _claim(request.work / _SETTINGS_FILE, settings, features=training.features)
        store = copy_recording(
            request.recording,
            training.features,
            target=request.model,
            exit_layer=config.exit_layer,
            seed=request.seed,
        )
        _, held_out = store.split(request.held_out_share, request.seed)
        try:
            _require_enough(request, store, held_out)
        except ConfigError:  # the recording may grow: do not keep this copy
            shutil.rmtree(store.folder)
            raise
        say(
            f"refresh: {store.manifest.num_tokens:,} tokens in {store.num_sequences:,} pieces, "
            f"{len(held_out):,} of them held out"
        )
        trained = train(training, executor=executor)
        report = _compared(request, spec, store, held_out, trained)
        _publish(request, trained, {"asked": settings, **asdict(report)})
    shutil.rmtree(request.work)
    return report


def described(report: RefreshReport) -> str:
    """Returns the comparison as a table."""
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
        "better with confidence: worth promoting"
        if report.gain.rises
        else "not better with confidence: the service keeps its head"
    )
    return "\n".join([*lines, verdict])


def _finished(out: Path, settings: dict[str, object], *, say: Say) -> RefreshReport:
    file = out / REPORT_FILE
    report = read_json(file) if file.exists() else {}
    if report.get("asked") != settings:
        raise ConfigError(
            f"{out}: exists, and is not what this command would make: use another folder with "
            "--out, or remove this one"
        )
    say(f"refresh: done before, {out}")
    return TypeAdapter(RefreshReport).validate_python(report)


def _claim(file: Path, settings: dict[str, object], *, features: Path) -> None:
    """Stores the request. Raises ConfigError if a copy of another recording, or with another split,
    exists."""
    if file.exists() and (features / MANIFEST_FILE).exists():
        require_same(file, settings, only=("recording", "held_out_share", "seed"))
    else:
        write_json(file, settings)


def _require_enough(request: RefreshRequest, store: FeatureStore, held_out: Sequence[int]) -> None:
    if len(held_out) < _LEAST_HELD_OUT:
        raise ConfigError(
            f"{request.recording}: {store.num_sequences} pieces leave {len(held_out)} to compare "
            f"on, expected at least {_LEAST_HELD_OUT}: let the service answer more requests, or "
            "raise recorder.sample_rate or --held-out-share"
        )


def _compared(
    request: RefreshRequest,
    spec: ModelSpec,
    store: FeatureStore,
    held_out: Sequence[int],
    trained: Path,
) -> RefreshReport:
    sequences = list(store.sequences(held_out))
    old, new = (
        judge(
            TrainableExitHead.read(folder, target=spec, target_path=request.model),
            sequences,
        )
        for folder in (request.head, trained)
    )
    return RefreshReport(
        num_pieces=store.num_sequences,
        num_tokens=store.manifest.num_tokens,
        num_held_out=len(held_out),
        old=figures(old),
        new=figures(new),
        gain=difference(old, new, of=lambda text: text.accepted, seed=request.seed),
        agreement_gain=difference(old, new, of=lambda text: text.agreed, seed=request.seed),
        one_minus_tv_gain=difference(old, new, of=lambda text: text.overlap, seed=request.seed),
    )


def _publish(request: RefreshRequest, trained: Path, report: dict[str, object]) -> None:
    """Writes the new head's folder atomically."""
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
            "calibration": "carried over from the old head, not fitted again: `eesd distill "
            "calibrate` does that"
            if has_calibration
            else "the old head had none",
            "refreshed_from": str(request.head),
            "provenance": collect_provenance(seed=request.seed).as_json(),
        },
    )
    put_in_place(ready, request.out)


def copy_recording(
    recording: Path, folder: Path, *, target: Path, exit_layer: int, seed: int
) -> FeatureStore:
    """Copies the present pieces of `recording`, or of folders below it, one per drafting node; an
    existing finished copy in `folder` is used unchanged.

    Raises ConfigError for an empty recording, CheckpointError for one of another target or with
    rows after another layer.
    """
    verifier = identity_of(target)
    if not (folder / MANIFEST_FILE).exists():
        expected = FeatureManifest(
            verifier=verifier,
            weights_sha256=weights_fingerprint(target),
            exits=(exit_layer,),
            top_k=0,
            seed=seed,
            max_length=0,
            shards=(),
        )
        _copy_sequences(list(_pieces_of(recording, expected)), recording, folder, expected)
    return FeatureStore.open(folder, expect=verifier)


def _pieces_of(recording: Path, expected: FeatureManifest) -> Iterator[FeatureSequence]:
    for file in sorted(recording.rglob(MANIFEST_FILE)):
        manifest = FeatureManifest.read(file.parent)
        _require_same_rows(file, manifest, expected)
        store = FeatureStore(file.parent, manifest)
        for index, entry in enumerate(manifest.shards):
            try:
                yield from store.shard(index)
            except CheckpointError:
                if (file.parent / entry.name).exists():
                    raise
                # The service has removed this shard since it wrote the manifest.


def _copy_sequences(
    sequences: list[FeatureSequence], recording: Path, folder: Path, manifest: FeatureManifest
) -> None:
    """Copies pieces to a store, with the smallest number of best tokens that all of them have."""
    if not sequences:
        raise ConfigError(
            f"{recording}: found nothing recorded, expected shards that a service wrote: serve "
            "with recorder.folder set to this folder, send it requests, then refresh"
        )
    top_k = min(sequence.top_ids_TK.shape[1] for sequence in sequences)
    alike = [
        replace(
            sequence,
            top_ids_TK=sequence.top_ids_TK[:, :top_k],
            top_logits_TK=sequence.top_logits_TK[:, :top_k],
        )
        for sequence in sequences
    ]
    replace(
        manifest,
        top_k=top_k,
        max_length=max(sequence.num_tokens for sequence in alike),
        shards=tuple(
            write_shard(folder, index, alike[first : first + _PER_SHARD])
            for index, first in enumerate(range(0, len(alike), _PER_SHARD))
        ),
    ).write(folder)


def _require_same_rows(file: Path, manifest: FeatureManifest, expected: FeatureManifest) -> None:
    if (manifest.verifier.sha256, manifest.weights_sha256) != (
        expected.verifier.sha256,
        expected.weights_sha256,
    ):
        raise CheckpointError(
            file=file,
            found=f"states of {manifest.verifier.name_or_path!r}, by its hashes another target",
            expected=f"states of {expected.verifier.name_or_path!r}, the given target",
            advice="set --model to the target that the service serves",
        )
    if manifest.exits != expected.exits:
        raise CheckpointError(
            file=file,
            found=f"rows after layer {', '.join(str(at) for at in manifest.exits)}",
            expected=f"rows after layer {expected.exits[0]}, which the head reads",
            advice="set --head to the one that the service drafts with",
        )
