"""`eesd serve`."""

import sys
from typing import Annotated

from typer import Context, echo

from serve_app.cli.configuration import EngineFlags, ServiceFlags, config_of
from serve_app.service.environment import prepare_for_cluster, prepare_for_local_ray
from serve_app.service.start_line import start_line


def serve(
    context: Context,
    engine: EngineFlags,
    service: ServiceFlags,
    address: Annotated[str | None, "Ray cluster to join; without it, Ray is started here"] = None,
) -> None:
    """Serves an OpenAI-compatible API on Ray until interrupted."""
    from eesd_dist.workers.checking import ModelCheck

    config = config_of(engine, service)
    shows_logs: bool = context.find_root().params["verbose"]
    check = None
    if address is None:
        check = ModelCheck(config.engine)  # while Ray is imported
        prepare_for_local_ray(shows_logs=shows_logs)
    else:
        prepare_for_cluster(shows_logs=shows_logs)
    # The logs of the actors would tear the line.
    with start_line(sys.stdout, say=echo, shows_progress=not shows_logs) as line:
        line.stage("importing Ray")
        # Ray reads the environment when it is imported.
        from serve_app.service.serving import run_service

        run_service(config, address=address, check=check, shows_logs=shows_logs, line=line)
