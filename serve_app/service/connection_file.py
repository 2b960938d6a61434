"""The connection file, by which other commands of a user find the service of `eesd serve`.

The Ray of the service requires a token. Address and token are in a file that only this user can
read, named by the service's port, as long as the service runs. A machine that lost power keeps the
file, so the address is tried before Ray is. Nothing here imports Ray, which reads the token when it
first needs it.
"""

import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from eesd_dist.errors import ConfigError
from eesd_dist.user_folders import is_private, require_private, temporary_folder
from serve_app.service.environment import TOKEN, prepare_for_cluster

_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFile:
    """Address and token of a local Ray instance."""

    address: str
    token: str


@contextmanager
def connection_file_for(port: int, *, address: str) -> Iterator[Path]:
    """Within the block the user's other commands can find the service on this port. Raises
    ConfigError when there is another one, which may not listen yet."""
    file = _file(port)
    with suppress(FileNotFoundError):
        earlier = _read_private(file)
        if not is_silent(earlier.address):
            raise ConfigError(
                f"a service of yours with port {port} runs or is starting (its Ray is at "
                f"{earlier.address}): choose another --port"
            )
    _write_private(
        file, json.dumps(asdict(ConnectionFile(address=address, token=os.environ[TOKEN])))
    )
    try:
        yield file
    finally:
        remove(file)


def remove(file: Path) -> None:
    file.unlink(missing_ok=True)
    with suppress(OSError):  # the folder may hold files of other services
        file.parent.rmdir()


def port_of_the_service() -> int | None:
    """Returns the port of the service that this user runs here; None without one.

    Raises ConfigError when there are several.
    """
    ports = list(_running_ports())
    if len(ports) > 1:
        raise ConfigError(
            f"{len(ports)} services of yours run here, on ports {', '.join(map(str, ports))}: name "
            "one with --port or --url"
        )
    return ports[0] if ports else None


def _running_ports() -> Iterator[int]:
    for file in sorted(_folder().glob("service-*.json")):
        port = file.stem.removeprefix("service-")
        with suppress(FileNotFoundError):  # that service has just ended
            if port.isdecimal() and not is_silent(_read_private(file).address):
                yield int(port)


def prepare_to_connect(address: str | None, *, port: int | None) -> str:
    """Sets the environment for `ray.init` and returns the address to give to it.

    Without an address it is that of the user's service on this port, or of the only one. Raises
    ConfigError when there is no such service.
    """
    if address is not None:
        prepare_for_cluster()
        return address
    if port is None:
        port = port_of_the_service()
    if port is None:
        raise ConfigError(
            "no service of yours runs here: start one with `eesd serve`, or name the --address of "
            "the Ray cluster it runs on"
        )
    file = _file(port)
    try:
        connection = _read_private(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"no service of yours on port {port}: name its --port, or the --address of the Ray "
            "cluster it runs on"
        ) from error
    if is_silent(connection.address):
        raise ConfigError(
            f"the service on port {port} is gone, nothing answers at {connection.address}: start "
            f"it again, or remove {file}, which it left behind"
        )
    prepare_for_cluster(token=connection.token)
    return connection.address


def is_silent(address: str) -> bool:
    """Returns whether HOST:PORT accepts no connection; False for addresses of another form.

    Ray itself would retry for minutes.
    """
    try:
        where = urlsplit(f"//{address.removeprefix('ray://')}")
        host, port = where.hostname, where.port
    except ValueError:
        return False
    if host is None or port is None:
        return False
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return True
    return False


def _file(port: int) -> Path:
    return _folder() / f"service-{port}.json"


def _folder() -> Path:
    private = os.environ.get("XDG_RUNTIME_DIR")
    return Path(private) / "eesd" if private else temporary_folder()


def _write_private(file: Path, content: str) -> None:
    folder = file.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}: it is for the service's address and token; set "
            "XDG_RUNTIME_DIR to a folder of yours, or unset it"
        ) from error
    require_private(folder)
    draft = file.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(content)
    draft.replace(file)


def _read_private(file: Path) -> ConnectionFile:
    """Raises FileNotFoundError without a file, ConfigError for one that eesd did not write."""
    require_private(file.parent)
    try:
        # Another user may have put a link or a pipe there: neither is followed or waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: remove it, and start the service") from error
    with os.fdopen(descriptor) as opened:
        file_stat = os.fstat(descriptor)
        if not stat.S_ISREG(file_stat.st_mode) or not is_private(file_stat):
            raise ConfigError(
                f"{file}: expected a file of yours that only you can read: remove it, and start "
                "the service again"
            )
        try:
            content = json.load(opened)
            address, token = content["address"], content["token"]
        except (ValueError, TypeError, KeyError) as error:
            raise _not_a_connection_file(file) from error
    if not isinstance(address, str) or not isinstance(token, str):
        raise _not_a_connection_file(file)
    return ConnectionFile(address=address, token=token)


def _not_a_connection_file(file: Path) -> ConfigError:
    return ConfigError(
        f"{file}: expected a service's address and token: remove it, and start the service again"
    )
