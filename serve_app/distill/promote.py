"""Gives a refreshed head to the running service, if it is better than the one it drafts with."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from eesd_dist.distill.folders import write_json
from eesd_dist.distill.refresh import REPORT_FILE, RefreshReport
from eesd_dist.model.heads.head_config import head_digest
from eesd_dist.model.spec import read_json
from serve_app.config import RouterConfig
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
