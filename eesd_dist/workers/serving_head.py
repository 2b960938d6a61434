"""The exit head that an engine drafts with, and what another one must have in common with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from eesd_dist.config import EngineConfig
from eesd_dist.control.calibrator import CALIBRATION_FILE, Calibrator
from eesd_dist.engine.layout import Layout
from eesd_dist.errors import CheckpointError
from eesd_dist.model.heads.head_config import HeadConfig
from eesd_dist.model.heads.head_files import head_digest
from eesd_dist.workers.messages import HeadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingHead:
    """Describes an exit head as it was loaded; its folder may have changed since."""

    report: HeadReport
    config: HeadConfig
    calibration: Mapping[str, object]


def serving_head(config: EngineConfig, layout: Layout) -> ServingHead | None:
    """Returns the configured exit head, or None where drafting is off. Raises CheckpointError for
    a head that does not fit the target."""
    folder = layout.head_folder
    if folder is None or config.speculation.max_draft_tokens == 0:
        return None
    head = HeadConfig.read(folder, target=layout.spec, target_path=config.model.path)
    file = folder / CALIBRATION_FILE
    version = json.loads(file.read_text()).get("version") if file.exists() else None
    return ServingHead(
        report=HeadReport(
            folder=str(folder),
            sha256=head_digest(folder),
            exit_layer=head.exit_layer,
            kind=head.kind,
        ),
        config=head,
        calibration={"num_judged": Calibrator.load(folder).num_judged, "version": version},
    )


def require_compatible(
    folder: str, new: ServingHead, *, serving: ServingHead, sha256: str | None
) -> None:
    """Raises CheckpointError where the new head differs in a property that the engine depends on.
    Kind and draft vocabulary are among them: drafting costs are measured only once."""
    if sha256 is not None:
        _require_same(folder, "digest", actual=new.report.sha256, expected=sha256)
    for what in ("exit_layer", "layer", "kind", "draft_vocab_size"):
        actual, expected = getattr(new.config, what), getattr(serving.config, what)
        _require_same(folder, what, actual=actual, expected=expected)


def _require_same(folder: str, what: str, *, actual: object, expected: object) -> None:
    if actual != expected:
        raise CheckpointError(
            file=folder,
            found=f"{what} {actual}",
            expected=f"{expected}, as in the present head",
            advice="restart the service with --head to change it",
        )
