"""How another command of the same user finds a service that `eesd serve` has started.

Its Ray takes in only who has its token. The token and the address lie in a file that only this user
can read, named by the service's port, for as long as the service runs. A killed one leaves its file
behind, so before anybody waits for Ray the address is tried. Nothing here imports Ray, which reads
the token when it is first asked for it.
"""

import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from eesd_dist.errors import ConfigError
from serve_app.session.environment import TOKEN, prepare_for_cluster

_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFile:
    """The way into one local Ray."""

    address: str
    token: str


@contextmanager
def connection_file_for(port: int, *, address: str) -> Iterator[None]:
    """Within the block the service on this port can be found by its user's other commands."""
    file = _file(port)
    _write_private(
        file, json.dumps(asdict(ConnectionFile(address=address, token=os.environ[TOKEN])))
    )
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # another service's file may lie there still
            file.parent.rmdir()


def prepare_to_connect(address: str | None, *, port: int) -> str:
    """Sets the environment for `ray.init` and returns the address to give to it.

    Raises ConfigError when no address is named and no service of this user has the port, or none
    any more.
    """
    if address is not None:
        prepare_for_cluster()
        return address
    file = _file(port)
    try:
        found = _read_private(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"no service of yours on port {port}: name its --port, or the --address of the Ray "
            "cluster it runs on"
        ) from error
    if is_silent(found.address):
        raise ConfigError(
            f"the service on port {port} is gone, nothing answers at {found.address}: start it "
            f"again, or remove {file}, which it left behind"
        )
    prepare_for_cluster(token=found.token)
    return found.address


def is_silent(address: str) -> bool:
    """Whether nothing takes a connection at HOST:PORT; False for what has no such form.

    Ray itself would try for minutes.
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
    return Path(private) / "eesd" if private else Path(tempfile.gettempdir()) / f"eesd-{_user()}"


def _user() -> int:
    return os.getuid()


def _write_private(file: Path, content: str) -> None:
    folder = file.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(folder)
    draft = file.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(content)
    draft.replace(file)


def _read_private(file: Path) -> ConnectionFile:
    """Raises FileNotFoundError where there is none, ConfigError for what we did not write."""
    _require_private(file.parent)
    try:
        # A link or a pipe that somebody has put there must neither lead nor stop us.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: remove it, and start the service") from error
    with os.fdopen(descriptor) as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not _is_private(found):
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


def _require_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_private(found):
        raise ConfigError(
            f"{folder}: expected a folder that only you can read, since a service's token lies "
            "there: remove it, or chmod 700"
        )


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == _user() and not found.st_mode & 0o077
