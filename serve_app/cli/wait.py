"""`eesd wait`."""

from typing import Annotated

from typer import echo

from serve_app.service.environment import prepare_for_cluster


def wait(
    url: Annotated[str | None, "URL of the service (http://127.0.0.1:PORT)"] = None,
    port: Annotated[int, "port of a service on this machine"] = 8000,
    address: Annotated[str | None, "Ray cluster: ends at once when Serve gives up"] = None,
    app: Annotated[str, "name of the Serve application"] = "eesd",
    timeout_s: Annotated[float | None, "seconds; without it, as long as it takes"] = None,
) -> None:
    """Waits until the service is healthy.

    Says what it waits for, whenever that changes. The exit status is 0 for a healthy service,
    else 1.
    """
    from serve_app.service.waiting import wait_until_healthy

    where = url or f"http://127.0.0.1:{port}"
    if address is None:
        wait_until_healthy(where, timeout_s=timeout_s, say=echo)
    else:
        prepare_for_cluster()
        # Ray reads the environment when it is imported.
        from serve_app.service.local_ray import connected_ray
        from serve_app.service.serve_instance import failure_of

        with connected_ray(address, shows_logs=False):
            wait_until_healthy(
                where, timeout_s=timeout_s, say=echo, failure=lambda: failure_of(app)
            )
    echo(f"healthy: {where}")
