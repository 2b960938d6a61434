"""How another command of the same user finds a service that `eesd serve` has started.

Its Ray takes in only who has its token. The token and the address lie in a file that only this user
can read, named by the service's port, for as long as the service runs. Nothing here imports Ray,
which reads the token when it is first asked for it.
"""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from eesd_dist.errors import ConfigError
from serve_app._environment import prepare_for_cluster

_TOKEN = "RAY_AUTH_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The way into one local Ray."""

    address: str
    token: str


@contextmanager
def pass_for(port: int, *, address: str) -> Iterator[None]:
    """Within the block the service on this port can be found by its user's other commands."""
    file = _file(port)
    _write_private(file, json.dumps(asdict(Pass(address=address, token=os.environ[_TOKEN]))))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # another service's pass may lie there still
            file.parent.rmdir()


def prepare_to_join(address: str | None, *, port: int) -> str:
    """Sets the environment for `ray.init` and returns the address to give to it.

    Raises ConfigError when no address is named and no service of this user has the port.
    """
    if address is not None:
        prepare_for_cluster()
        return address
    file = _file(port)
    try:
        found = Pass(**json.loads(file.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(
            f"no service of yours on port {port}: name its --port, or the --address of the Ray "
            "cluster it runs on"
        ) from error
    os.environ.update({"RAY_AUTH_MODE": "token", _TOKEN: found.token})
    return found.address


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
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != _user() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: expected a folder that only you can read, since the service's token goes "
            "there: remove it, or chmod 700"
        )
    draft = file.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(content)
    draft.replace(file)
