"""`eesd stop`."""

from typing import Annotated

from typer import echo

from serve_app.cli.running_service import router_named
from serve_app.service.environment import prepare_for_cluster


def stop(
    address: Annotated[str, "Ray cluster that the service was started on"],
    app: Annotated[str, "name of the Serve application"] = "eesd",
    router: Annotated[str | None, "Ray name of the router"] = None,
    namespace: Annotated[str | None, "Ray namespace of the router"] = None,
) -> None:
    """Stops the service of `eesd serve --address`.

    The cluster and its Serve go on.
    """
    prepare_for_cluster()
    # Ray reads the environment when it is imported.
    from serve_app.service.serving import stop_service

    stop_service(address, app_name=app, router=router_named(router, namespace))
    echo(f"stopped: {app}")
